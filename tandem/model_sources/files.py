"""Reads the small files of a model folder, which come from strangers."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from tandem.errors import ModelFolderError

MAX_CONFIG_BYTES = 16 << 20
"""Maximum size of config.json, generation_config.json and tokenizer_config.json. Published ones have some 100 KiB."""


def read_object(path: Path, why: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file; `why` completes the sentence about a file that is not there."""
    try:
        if not path.is_file():
            raise ModelFolderError(f"the model folder {path.parent} has no {path.name}; {why}")
        check_size(path, max_bytes)
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except OSError as error:
        raise unreadable(path, error) from error
    except RecursionError:
        raise refusal(path, "should be JSON, but is nested too deeply to be read") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more digits than Python reads
        raise refusal(path, f"should be JSON, but does not parse: {error}") from error
    if not isinstance(content, dict):
        raise refusal(path, f"should hold a JSON object, but holds a {type(content).__name__}")
    return content


def refusal(path: Path | str, fault: str) -> ModelFolderError:
    """The refusal of a file; `fault` completes the sentence."""
    return ModelFolderError(f"the file {path} {fault}")


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def check_size(path: Path, max_bytes: int) -> None:
    """Refuse a file of more bytes."""
    size = path.stat().st_size
    if size > max_bytes:
        raise refusal(path, f"has {size} bytes; it should have at most {max_bytes} to be read")


def unreadable(path: Path, error: OSError) -> ModelFolderError:
    """The refusal of the file that the system names, or of this path where the error names none."""
    reason = error.strerror.lower() if error.strerror else str(error)
    is_named = error.filename is not None and error.errno != errno.ENAMETOOLONG
    return refusal(error.filename if is_named else path, f"cannot be read: {reason}")
