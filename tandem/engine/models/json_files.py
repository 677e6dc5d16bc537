"""JSON files of a model folder, which come from strangers: read within bounds, and refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import ModelFolderError

MAX_CONFIG_BYTES = 16 << 20
"""Maximum size of config.json, generation_config.json and tokenizer_config.json. Published ones have some 100 KiB."""


def read_object(path: Path, why: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        why: completes the sentence about a file that is not there.
        max_bytes: size above which the file is not read.

    Raises:
        ModelFolderError: the file is not there, too large, no JSON, or holds another value than an object.
    """
    try:
        if not path.is_file():
            raise ModelFolderError(f"the model folder {path.parent} has no {path.name}; {why}")
        check_size(path, max_bytes)
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except OSError as error:
        raise unreadable(path, error) from error
    except RecursionError:
        raise ModelFolderError(
            f"the file {path} should be JSON, but is nested too deeply to be read"
        ) from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more digits than Python reads
        raise ModelFolderError(f"the file {path} should be JSON, but does not parse: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(
            f"the file {path} should hold a JSON object, but holds a {type(content).__name__}"
        )
    return content


def _constant(name: str) -> float:
    """Infinity, which some configs have for a limit. NaN is no JSON either, and no number to compute with."""
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def check_size(path: Path, max_bytes: int) -> None:
    """Refuse a file that is larger than any of its kind.

    Raises:
        ModelFolderError: it is.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ModelFolderError(
            f"the file {path} has {size} bytes; it should have at most {max_bytes} to be read"
        )


def unreadable(path: Path, error: OSError) -> ModelFolderError:
    """The refusal of a file that the operating system does not let us read."""
    return ModelFolderError(f"the file {path} cannot be read: {(error.strerror or str(error)).lower()}")
