"""The error of an installation without the extra `engine` when a model is to be loaded."""

from __future__ import annotations

import importlib.util

from tandem.errors import ConfigurationError

_ENGINE_PACKAGES = ("torch", "transformers", "safetensors")


def require_engine() -> None:
    """See to it, without importing them, that the packages which run a model are installed.

    Raises:
        ConfigurationError: some are not; the sentence names the extra.
    """
    missing = [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"running a model needs {', '.join(missing)}; install the extra: "
            "pip install 'tandem-speculative[engine]'"
        )
