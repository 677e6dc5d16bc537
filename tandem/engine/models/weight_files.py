"""A model folder's weights as safetensors files: which they are, and whether their headers hold together.

Nothing of the data is read. The format is specified at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from tandem.engine.models.json_files import read_object, unreadable
from tandem.errors import ModelFolderError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_SUFFIX = ".safetensors"
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
_MAX_INDEX_BYTES = 100_000_000
_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of a checkpoint, from the headers of its files."""

    files: tuple[Path, ...]
    tensor_count: int
    """Tensors that hold anything."""
    value_count: int
    """Numbers in all of the tensors."""
    names: frozenset[str]
    """The tensors' names."""


def find_weights(folder: Path) -> Weights:
    """The weights of a model folder.

    Raises:
        ModelFolderError: there are none, some are missing, or a file is damaged.
    """
    files = _weight_files(folder)
    shapes = [shape for file in files for shape in _shapes(file)]
    sizes = [prod(shape) for _, shape in shapes]
    return Weights(files, sum(size > 0 for size in sizes), sum(sizes), frozenset(name for name, _ in shapes))


def first_of(names: Sequence[str]) -> str:
    """The first name, and the number of others: short enough for a sentence."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / WEIGHTS_INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return (folder / WEIGHTS_FILE,)
    if index.is_file():
        return _sharded_files(index)
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise ModelFolderError(
            f"the model folder {folder} has its weights only as pickle ({pickled[0]}), which can run code when it is "
            "loaded; convert it once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelFolderError(
        f"the model folder {folder} has no weights: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}"
    )


def _sharded_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_object(index, "it was just there", _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(
            f"the file {index} should have a 'weight_map' from tensor names to files, but has none"
        )
    foreign = next((name for name in weight_map.values() if not _is_inside(name)), None)
    if foreign is not None:
        raise ModelFolderError(
            f"the file {index} names the file {shortened(foreign)}; it should name {_SUFFIX} files inside its folder"
        )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelFolderError(
            f"the checkpoint in {index.parent} is incomplete: {index.name} names {len(names)} files, of which "
            f"these are missing: {first_of(missing)}"
        )
    return tuple(index.parent / name for name in names)


def _is_inside(name: object) -> bool:
    """True if a file's name stays in the folder. Links are followed: Hugging Face's cache consists of them."""
    if not isinstance(name, str) or not name.endswith(_SUFFIX) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def shortened(value: object) -> str:
    """A value as Python writes it, cut to fit a sentence."""
    text = repr(value)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a file's tensors, whose header fits the file.

    Raises:
        ModelFolderError: it does not, or describes impossible tensors.
    """
    try:
        _check_whole(path)
        with safe_open(
            path, framework="np"
        ) as tensors:  # checks offsets, shapes and dtypes against each other
            return [(name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        reason = str(error).partition("\n")[0].rstrip(".")[:_LONGEST_REASON]
        raise ModelFolderError(f"the file {path} is damaged: {reason}") from error


def _check_whole(path: Path) -> None:
    """A safetensors file says in its header how long it is, so that a truncated one is known by its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        data_start = _HEADER_LENGTH_BYTES + header_length
        if size < data_start or header_length == 0:
            raise ModelFolderError(
                f"the file {path} is truncated or not safetensors: its header should end at byte {data_start}, "
                f"but the file has {size} bytes"
            )
        if header_length > _MAX_HEADER_BYTES:
            raise ModelFolderError(
                f"the file {path} is not safetensors: its header has {header_length} bytes; the format allows "
                f"{_MAX_HEADER_BYTES}"
            )
        header = file.read(header_length)
    expected = data_start + _data_length(path, header)
    if size != expected:
        fault = "truncated" if size < expected else "damaged"
        raise ModelFolderError(
            f"the file {path} is {fault}: its header describes {expected} bytes, but it has {size}"
        )


def _data_length(path: Path, header: bytes) -> int:
    try:
        entries = json.loads(header)
        return max(
            (int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"),
            default=0,
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ModelFolderError(
            f"the file {path} is damaged: its header is not that of a safetensors file"
        ) from error
