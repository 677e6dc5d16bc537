"""The folders of the bundled demo pair, in a wheel and in a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigurationError

WHEEL_PACKAGE = "tandem_demo"
"""The package that holds the pair in a wheel, beside `tandem`; the build hook puts it there."""

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (_ROOT / WHEEL_PACKAGE, _ROOT / "models" / "demo")


@dataclass(frozen=True, slots=True)
class DemoPair:
    """The two model folders of the demo pair."""

    target: Path
    draft: Path


def demo_pair() -> DemoPair:
    """Find the bundled pair.

    Raises:
        ConfigurationError: this installation does not contain the pair.
    """
    for folder in _FOLDERS:
        pair = DemoPair(folder / "target", folder / "draft")
        if (pair.target / "config.json").is_file() and (pair.draft / "config.json").is_file():
            return pair
    raise ConfigurationError(
        "the demo models are not part of this installation; name a model with --target, a folder or a Hugging Face id"
    )
