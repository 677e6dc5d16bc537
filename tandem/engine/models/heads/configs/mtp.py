"""Layers for multi-token prediction (MTP) in a target's own checkpoint, by its `config.json`. Needs no torch.

DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5 store them behind the model's last layer: `model.layers.{layers}.` and so on.
Qwen3-Next stores its one beside the model, as `mtp.`, and its config does not mention it. Models of Qwen3 are read in
that layout too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.models.checkpoint import CONFIG_FILE
from tandem.engine.models.heads.configs.values import size
from tandem.engine.models.json_files import read_object
from tandem.engine.models.weight_files import find_weights
from tandem.errors import ModelFolderError

_APPENDED_FAMILIES = ("deepseek_v3", "glm4_moe")
_SEPARATE_FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next")
FAMILIES = (*_APPENDED_FAMILIES, *_SEPARATE_FAMILIES)
"""By `model_type`."""

_SEPARATE_PREFIX = "mtp."
_FIRST_TENSOR = f"{_SEPARATE_PREFIX}fc.weight"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of the number of layers; the second is that of Qwen's later models."""


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Where a target's first MTP layer lies."""

    folder: Path
    prefix: str
    """Of the names of its tensors."""
    is_separate: bool
    """Named as Qwen3-Next's, and no layer of the model's own numbering."""


def read_mtp_config(folder: Path) -> MtpConfig:
    """The MTP layer of a target's checkpoint.

    Raises:
        ModelFolderError: the model is of another family, or has no such layer.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a model needs one")
    family = content.get("model_type")
    if family not in FAMILIES:
        raise ModelFolderError(
            f"the file {path} has the model_type {family!r}; the method mtp needs a model with layers for multi-token "
            f"prediction, and here that is one of {', '.join(FAMILIES)}"
        )
    return _separate(folder, content) if family in _SEPARATE_FAMILIES else _appended(folder, content)


def _appended(folder: Path, content: Mapping[str, Any]) -> MtpConfig:
    _check_count(folder, _COUNTS[0], content.get(_COUNTS[0]))
    layers, _ = (
        size(folder / CONFIG_FILE, content, key) for key in ("num_hidden_layers", "n_routed_experts")
    )
    return MtpConfig(folder, f"model.layers.{layers}.", is_separate=False)


def _separate(folder: Path, content: Mapping[str, Any]) -> MtpConfig:
    for key in _COUNTS:
        if content.get(key) is not None:
            _check_count(folder, key, content[key])
    if _FIRST_TENSOR not in find_weights(folder).names:
        raise ModelFolderError(
            f"the model in {folder} has no layers for multi-token prediction: it has no tensor {_FIRST_TENSOR}"
        )
    return MtpConfig(folder, _SEPARATE_PREFIX, is_separate=True)


def _check_count(folder: Path, key: str, count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise ModelFolderError(
            f"the model in {folder} has no layers for multi-token prediction: {key} is {count!r}; it must be at least 1"
        )
