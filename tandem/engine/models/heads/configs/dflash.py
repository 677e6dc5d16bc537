"""A DFlash draft's `config.json`, in z-lab's format or the speculators format. Needs no torch.

z-lab's is a Qwen3 config with `block_size` and `dflash_config`. The speculators format (`DFlashSpeculatorConfig`) wraps
such a config as `transformer_layer_config`, and may have a reduced vocabulary (`draft_vocab_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.names import DFLASH
from tandem.engine.models.checkpoint import CONFIG_FILE
from tandem.engine.models.heads.configs.values import nested, size
from tandem.engine.models.json_files import read_object
from tandem.errors import ModelFolderError

ARCHITECTURE = "DFlashDraftModel"

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_OPTIONS = "dflash_config"
_LAYER_MODELS = ("qwen3", "llama")
"""Families whose config names a speculators draft's layers; these are Qwen3's either way."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Settings that a DFlash draft needs beside its layers' config."""

    architecture = ARCHITECTURE

    folder: Path
    content: Mapping[str, Any]
    """The layers' config, that of a small Qwen3 model."""
    block_size: int
    """Tokens of a block: the last one of the text, and the masks that become the proposal."""
    mask_token_id: int
    layer_ids: tuple[int, ...]
    """Which of the target's states are read, by the number of layers before them."""
    draft_vocabulary_size: int | None = None
    """Tokens that the draft can say, with an output layer of its own; None for all, by the target's."""
    target_hidden_size: int | None = None
    """Width of the target's states; None where the config leaves it to the draft's own width."""


def read_dflash_config(folder: Path) -> DFlashConfig:
    """The config of a DFlash draft.

    Raises:
        ModelFolderError: there is none, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    return _wrapped(path, content) if _SPECULATORS_TYPE in content else _raw(path, content)


def _raw(path: Path, content: Mapping[str, Any]) -> DFlashConfig:
    names = content.get("architectures")
    if names != [ARCHITECTURE]:
        raise ModelFolderError(
            f"the file {path} is no DFlash draft's: architectures is {names!r}; it must be ['{ARCHITECTURE}']"
        )
    options = nested(path, content, _OPTIONS)
    _check_layers(path, content)
    # Older checkpoints have it beside the layers' numbers, newer ones among the options.
    block_size = content.get("block_size", options.get("block_size"))
    return DFlashConfig(
        folder=path.parent,
        content=content,
        block_size=_block_size(path, block_size),
        mask_token_id=_mask_token_id(path, options.get("mask_token_id"), f"{_OPTIONS}.mask_token_id"),
        # z-lab counts the layers from 0, and means their outputs.
        layer_ids=tuple(
            each + 1
            for each in _layer_ids(path, options.get("target_layer_ids"), f"{_OPTIONS}.target_layer_ids")
        ),
    )


def _wrapped(path: Path, content: Mapping[str, Any]) -> DFlashConfig:
    if content[_SPECULATORS_TYPE] != DFLASH:
        raise ModelFolderError(
            f"the file {path} has {_SPECULATORS_TYPE} {content[_SPECULATORS_TYPE]!r}; that of a DFlash draft must be "
            f"{DFLASH!r}"
        )
    layers = nested(path, content, _LAYER_CONFIG)
    if layers.get("model_type", _LAYER_MODELS[0]) not in _LAYER_MODELS:
        raise ModelFolderError(
            f"the file {path} has model_type {layers['model_type']!r} in {_LAYER_CONFIG}; a DFlash draft has "
            f"{' or '.join(_LAYER_MODELS)} here"
        )
    for each in (layers, content):
        _check_layers(path, each)
    for key, only in (("sample_from_anchor", False), ("projector_type", DFLASH)):
        if content.get(key) not in (None, only):
            raise ModelFolderError(
                f"the file {path} has {key} {content[key]!r}; a DFlash draft has {only!r} here"
            )
    vocabulary_size, hidden_size = size(path, layers, "vocab_size"), size(path, layers, "hidden_size")
    draft_vocabulary_size = size(path, content, "draft_vocab_size", vocabulary_size)
    return DFlashConfig(
        folder=path.parent,
        content=layers,
        block_size=_block_size(path, content.get("block_size")),
        mask_token_id=_mask_token_id(path, content.get("mask_token_id"), "mask_token_id"),
        layer_ids=_layer_ids(path, content.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"),
        draft_vocabulary_size=None if draft_vocabulary_size == vocabulary_size else draft_vocabulary_size,
        target_hidden_size=size(path, content, "target_hidden_size", hidden_size),
    )


def _check_layers(path: Path, layers: Mapping[str, Any]) -> None:
    for key, allowed in (("layer_types", "full_attention"), ("hidden_act", "silu")):
        values = layers.get(key) or ()
        for value in (values,) if isinstance(values, str) else values:
            if value != allowed:
                raise ModelFolderError(
                    f"the file {path} has {value!r} in {key}; a DFlash draft has {allowed} here"
                )


def _block_size(path: Path, value: object) -> int:
    if type(value) is not int or value < 2:
        raise ModelFolderError(
            f"the file {path} should have a number of at least 2 in block_size, but it is {value!r}"
        )
    return value


def _mask_token_id(path: Path, value: object, key: str) -> int:
    if type(value) is not int or value < 0:
        raise ModelFolderError(f"the file {path} should have a token id in {key}, but it is {value!r}")
    return value


def _layer_ids(path: Path, value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise ModelFolderError(f"the file {path} should have layer numbers in {key}, but it is {value!r}")
    return tuple(value)
