"""Reads a Hugging Face folder's files in seconds and without torch.

A service must refuse a wrong folder at once, not after importing a deep-learning framework and reading gigabytes. So
this module only reads files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.engine.models.config_numbers import check_numbers
from tandem.engine.models.json_files import MAX_CONFIG_BYTES, check_size, read_object, unreadable
from tandem.engine.models.weight_files import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    Weights,
    find_weights,
    shortened,
)
from tandem.errors import ModelFolderError

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

_MAX_TOKENIZER_BYTES = 128 << 20
"""Four times the largest that is published."""
_MAX_SENT_BYTES = {"tokenizer_config.json": MAX_CONFIG_BYTES, "chat_template.jinja": 1 << 20}
"""Maximum sizes of files that are sent to coordinators unchanged."""
_MAX_END_IDS = 256

_RECURRENT_LAYER_TYPES = frozenset(
    {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
)
"""Values of `layer_types` whose state is overwritten at each token, so that rollback is impossible."""

_RECURRENT_MODEL_TYPES = frozenset(
    {
        "bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Families with recurrent layers, some of which do not say so in `layer_types`."""

_SOMETIMES_RECURRENT_MODEL_TYPES = frozenset({"qwen3_next"})
"""Families whose layers are recurrent unless `layer_types` says that all have attention."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that holds a whole checkpoint of a decoder-only model."""

    folder: Path
    architecture: str
    """Class name, for instance ``LlamaForCausalLM``."""
    model_type: str
    config: Mapping[str, Any]
    """`config.json` as it stands."""
    weights: Weights
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
            f"the model folder {folder} should be a directory with a checkpoint, but {found} is there"
        )
    try:
        return _opened(folder)
    except OSError as error:
        raise unreadable(folder, error) from error


def _opened(folder: Path) -> Checkpoint:
    config = read_object(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    architecture = _architecture(folder, config)
    model_type = str(config.get("model_type", ""))
    _refuse_unusable(folder, architecture, model_type, config)
    weights = find_weights(folder)
    check_numbers(folder / CONFIG_FILE, config, weights.tensor_count)
    _check_tokenizer_file(folder)
    for name, max_bytes in _MAX_SENT_BYTES.items():
        if (folder / name).is_file():
            check_size(folder / name, max_bytes)
    return Checkpoint(folder, architecture, model_type, config, weights, eos_token_ids(folder))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, else those of config.json, else none.

    Raises:
        ModelFolderError: a file does not parse, or the value is neither an id nor a list of ids.
    """
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        path = folder / name
        if not path.is_file():
            continue
        config = read_object(path, "it was just there")
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
    path = _check_tokenizer_file(Path(folder))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception, whatever the cause
        raise ModelFolderError(f"the file {path} is not a tokenizer that can be read: {error}") from error
    return _mapping_hash(tokenizer.get_vocab(with_added_tokens=True).items())


def _check_tokenizer_file(folder: Path) -> Path:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelFolderError(
            f"the model folder {folder} has no {TOKENIZER_FILE}, which is needed to compare vocabularies"
        )
    check_size(path, _MAX_TOKENIZER_BYTES)
    return path


def _mapping_hash(pairs: Iterable[tuple[str, int]]) -> str:
    digest = hashlib.sha256()
    for token, token_id in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{token_id}\t{json.dumps(token)}\n".encode())
    return digest.hexdigest()


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    raise ModelFolderError(
        f"the file {folder / CONFIG_FILE} names no model class: 'architectures' is {architectures!r} "
        "and should be a list such as ['LlamaForCausalLM']"
    )


def _refuse_unusable(folder: Path, architecture: str, model_type: str, config: Mapping[str, Any]) -> None:
    if config.get("is_encoder_decoder"):
        raise ModelFolderError(
            f"the model in {folder} is an encoder-decoder ({architecture}); only decoder-only models can be served"
        )
    if config.get("transformers_weights") is not None:
        raise ModelFolderError(
            f"the file {folder / CONFIG_FILE} has transformers_weights {shortened(config['transformers_weights'])}; it "
            f"should have none, since weights are read from {WEIGHTS_FILE} or {WEIGHTS_INDEX_FILE} alone"
        )
    kinds = config.get("layer_types")
    layer_types = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    is_recurrent = bool(layer_types & _RECURRENT_LAYER_TYPES) or model_type in _RECURRENT_MODEL_TYPES
    if is_recurrent or (
        model_type in _SOMETIMES_RECURRENT_MODEL_TYPES and not has_attention_alone(model_type, layer_types)
    ):
        raise recurrent_state_error(folder, architecture)


def has_attention_alone(model_type: str, layer_types: Iterable[str]) -> bool:
    """True for a model of a family with recurrent layers that has none of them itself."""
    return model_type in _SOMETIMES_RECURRENT_MODEL_TYPES and set(layer_types) == {"full_attention"}


def recurrent_state_error(folder: Path, architecture: str) -> ModelFolderError:
    """The refusal of a model whose cache cannot be rolled back after a rejected token."""
    return ModelFolderError(
        f"the model in {folder} ({architecture}) keeps recurrent state, which cannot be rolled back when a proposed "
        "token is rejected; a model with attention layers only is needed"
    )


def _ids(path: Path, value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if len(values) > _MAX_END_IDS or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values
    ):
        raise ModelFolderError(
            f"the file {path} has eos_token_id {shortened(value)}; it should be an id or a list of up to "
            f"{_MAX_END_IDS} ids"
        )
    return tuple(values)
