"""What can be said of a Hugging Face folder from its files alone, in seconds and without torch.

A service that is pointed at the wrong folder must say so at once, not after importing a deep-learning framework and
reading gigabytes. Everything here is therefore plain file reading.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.errors import ModelFolderError

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_HEADER_LENGTH_BYTES = 8

_RECURRENT_LAYER_TYPES = frozenset(
    {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
)
"""Values of `layer_types` whose state is overwritten at each token, so that no earlier state can be gone back to."""

_RECURRENT_MODEL_TYPES = frozenset(
    {
        "bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Families with recurrent layers, some of which do not say so in `layer_types`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that holds a whole checkpoint of a decoder-only model."""

    folder: Path
    architecture: str
    """Class name, for instance ``LlamaForCausalLM``."""
    model_type: str
    config: Mapping[str, Any]
    """`config.json` as it stands."""
    weight_files: tuple[Path, ...]
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; empty when the folder names none."""


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Checks everything that can be checked without reading the weights.

    Raises:
        ModelFolderError: the folder is not there, is incomplete, holds only pickled weights, has a truncated file, or
            is of a kind of model that speculative decoding cannot use.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ModelFolderError(
            f"The model folder {folder} should be a directory with a checkpoint, but {found} is there."
        )
    config = _read_json(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    architecture = _architecture(folder, config)
    model_type = str(config.get("model_type", ""))
    _refuse_unusable(folder, architecture, model_type, config)
    weight_files = _weight_files(folder)
    for file in weight_files:
        _check_whole(file)
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelFolderError(
            f"The model folder {folder} has no {TOKENIZER_FILE}, which is needed to compare vocabularies."
        )
    return Checkpoint(folder, architecture, model_type, config, weight_files, eos_token_ids(folder))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, else those of config.json, else none.

    Raises:
        ModelFolderError: a file does not parse, or the value is neither an id nor a list of ids.
    """
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        path = folder / name
        if not path.is_file():
            continue
        config = _read_json(path, "it was just there")
        text_config = config.get("text_config")
        nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
        value = config.get("eos_token_id", nested)
        if value is not None:
            return _ids(path, value)
    return ()


def tokenizer_hash(folder: str | Path) -> str:
    """SHA-256, in hexadecimal, of the mapping from token to id, added tokens included.

    Two folders with the same hash give every id the same meaning, however their files are laid out.

    Raises:
        ModelFolderError: there is no tokenizer.json, or it does not parse.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise ModelFolderError(
            f"The model folder {folder} has no {TOKENIZER_FILE}, which is needed to compare vocabularies."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception, whatever the cause
        raise ModelFolderError(f"The file {path} is not a tokenizer that can be read: {error}.") from error
    return _mapping_hash(tokenizer.get_vocab(with_added_tokens=True).items())


def _mapping_hash(pairs: Iterable[tuple[str, int]]) -> str:
    digest = hashlib.sha256()
    for token, token_id in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{token_id}\t{json.dumps(token)}\n".encode())
    return digest.hexdigest()


def _read_json(path: Path, why: str) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFolderError(f"The model folder {path.parent} has no {path.name}; {why}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"The file {path} should be JSON, but does not parse: {error}.") from error
    if not isinstance(content, dict):
        raise ModelFolderError(
            f"The file {path} should hold a JSON object, but holds a {type(content).__name__}."
        )
    return content


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    raise ModelFolderError(
        f"The file {folder / CONFIG_FILE} names no model class: 'architectures' is {architectures!r} "
        "and should be a list such as ['LlamaForCausalLM']."
    )


def _refuse_unusable(folder: Path, architecture: str, model_type: str, config: Mapping[str, Any]) -> None:
    if config.get("is_encoder_decoder"):
        raise ModelFolderError(
            f"The model in {folder} is an encoder-decoder ({architecture}); only decoder-only models can be served."
        )
    layer_types = {str(kind) for kind in config.get("layer_types") or ()}
    recurrent = sorted(layer_types & _RECURRENT_LAYER_TYPES)
    if recurrent or model_type in _RECURRENT_MODEL_TYPES:
        raise recurrent_state_error(folder, architecture)


def recurrent_state_error(folder: Path, architecture: str) -> ModelFolderError:
    """The refusal of a model whose cache forgets what a rejected token overwrote."""
    return ModelFolderError(
        f"The model in {folder} ({architecture}) keeps recurrent state, which cannot be rolled back when a proposed "
        "token is rejected; a model with attention layers only is needed."
    )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / WEIGHTS_INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return (folder / WEIGHTS_FILE,)
    if index.is_file():
        return _sharded_files(index)
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise ModelFolderError(
            f"The model folder {folder} has its weights only as pickle ({pickled[0]}), which can run code when it is "
            "loaded; convert it once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
        )
    raise ModelFolderError(
        f"The model folder {folder} has no weights: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}."
    )


def _sharded_files(index: Path) -> tuple[Path, ...]:
    weight_map = _read_json(index, "it was just there").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(
            f"The file {index} should have a 'weight_map' from tensor names to files, but has none."
        )
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelFolderError(
            f"The checkpoint in {index.parent} is incomplete: {index.name} names {len(names)} files, of which "
            f"these are missing: {first_of(missing)}."
        )
    return tuple(index.parent / name for name in names)


def first_of(names: SequenceOf[str]) -> str:
    """The first name, and how many more there are: enough to know what is wrong, short enough for a sentence."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_whole(path: Path) -> None:
    """A safetensors file says in its header how long it is, so that a truncated one is known by its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        data_start = _HEADER_LENGTH_BYTES + header_length
        if size < data_start or header_length == 0:
            raise ModelFolderError(
                f"The file {path} is truncated or not safetensors: its header should end at byte {data_start}, "
                f"but the file has {size} bytes."
            )
        header = file.read(header_length)
    expected = data_start + _data_length(path, header)
    if size != expected:
        fault = "truncated" if size < expected else "damaged"
        raise ModelFolderError(
            f"The file {path} is {fault}: its header describes {expected} bytes, but it has {size}."
        )


def _data_length(path: Path, header: bytes) -> int:
    try:
        entries = json.loads(header)
        return max(
            (entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelFolderError(
            f"The file {path} is damaged: its header is not that of a safetensors file."
        ) from error


def _ids(path: Path, value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelFolderError(
            f"The file {path} has eos_token_id {value!r}; it should be an id or a list of ids."
        )
    return tuple(values)
