"""An EAGLE head's `config.json` (EAGLE-1 and 2), in one of three formats. Needs no torch.

SafeAILab's is a Llama config of one layer, and nothing in it says that it is a head's: the folder's name or the option
does. vLLM's `EAGLEConfig` has `model_type` eagle and wraps that config as `model`. The speculators format
(`EagleSpeculatorConfig`) wraps it as `transformer_layer_config`, and has the flags `fusion_bias` and `layernorms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.names import EAGLE
from tandem.engine.models.checkpoint import CONFIG_FILE
from tandem.engine.models.heads.configs.values import check_layer, flag, nested, size
from tandem.engine.models.json_files import read_object
from tandem.errors import ModelFolderError

_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_LAYER, _LAYER_KEY = "LlamaDecoderLayer", "transformer_layer_architecture"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of an EAGLE head."""

    folder: Path
    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    epsilon: float
    """Added to the mean square in each RMSNorm."""
    is_speculators: bool
    """In the speculators format, whose tensors have names of their own."""
    has_bias: bool | None
    """The first layer has a bias; None where the tensors say it."""
    has_norms: bool
    """RMSNorms of the embedding, before the attention, and before the output layer; SafeAILab's heads have none."""
    method: str = EAGLE


def read_eagle_config(folder: Path) -> EagleConfig:
    """The config of an EAGLE head.

    Raises:
        ModelFolderError: there is none, its format is another one, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    is_speculators = _SPECULATORS_TYPE in content
    layer = _layer(path, content, is_speculators=is_speculators)
    _check_format(path, content, layer)
    hidden_size, heads = size(path, layer, "hidden_size"), size(path, layer, "num_attention_heads")
    architectures = content.get("architectures")
    return EagleConfig(
        folder=folder,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "EAGLEModel",
        hidden_size=hidden_size,
        intermediate_size=size(path, layer, "intermediate_size"),
        heads=heads,
        kv_heads=size(path, layer, "num_key_value_heads", heads),
        head_dim=size(path, layer, "head_dim", hidden_size // heads),
        vocabulary_size=size(path, layer, "vocab_size"),
        epsilon=float(layer.get("rms_norm_eps") or 1e-6),
        is_speculators=is_speculators,
        has_bias=flag(path, content, "fusion_bias") if is_speculators else None,
        has_norms=is_speculators and flag(path, content, "layernorms"),
    )  # fmt: skip


def _layer(path: Path, content: Mapping[str, Any], *, is_speculators: bool) -> Mapping[str, Any]:
    """The config of the head's one layer."""
    if not is_speculators:
        wrapped = content.get("model")
        return wrapped if isinstance(wrapped, dict) else content
    if content[_SPECULATORS_TYPE] != EAGLE:
        raise ModelFolderError(
            f"the file {path} has {_SPECULATORS_TYPE} {content[_SPECULATORS_TYPE]!r}; that of an EAGLE head must be "
            f"{EAGLE!r}"
        )
    if content.get(_LAYER_KEY) not in (None, _LAYER):
        raise ModelFolderError(
            f"the file {path} has {_LAYER_KEY} {content[_LAYER_KEY]!r}; an EAGLE head has {_LAYER!r} here"
        )
    return nested(path, content, _LAYER_CONFIG)


def _check_format(path: Path, content: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    for key in _OTHER_FORMATS:
        if content.get(key):
            raise ModelFolderError(
                f"the file {path} has {key} {content[key]!r}, which an EAGLE head does not have; it should be a Llama "
                "config of one layer, as SafeAILab publishes it"
            )
    truncated, whole = content.get("truncated_vocab_size"), layer.get("vocab_size")
    if truncated not in (None, whole):
        raise ModelFolderError(
            f"the file {path} has truncated_vocab_size {truncated!r}; an EAGLE head has the whole vocabulary here, "
            f"{whole!r}"
        )
    flag(path, content, "bias")
    check_layer(path, layer, "an EAGLE head")
