"""An EAGLE-3 head's `config.json`, in the raw format (SafeAILab, NVIDIA) or the speculators format. Needs no torch.

A raw EAGLE-3 checkpoint is a Llama config of one layer with `draft_vocab_size`. The speculators format wraps such a
config as `transformer_layer_config` and names the method `speculators_model_type`. NVIDIA puts the flags into an object
`eagle_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.models.checkpoint import CONFIG_FILE
from tandem.engine.models.heads.configs.values import check_layer, flag, nested, size
from tandem.engine.models.json_files import read_object
from tandem.errors import ModelFolderError

EAGLE3 = "eagle3"

_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
    "Eagle3Speculator": EAGLE3,
}
"""Methods by the first entry of `architectures`; vLLM's registry has the same names."""

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and flags of an EAGLE-3 head."""

    folder: Path
    method: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    draft_vocabulary_size: int
    epsilon: float
    """Added to the mean square in each RMSNorm."""
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    """Which of the target's residual streams the head reads, each by the number of layers before it; None for the
    default of the target's depth."""
    norm_before_residual: bool
    """The layer's residual is the normalized state, not the state itself."""
    norm_before_fc: bool
    """One RMSNorm over the concatenated states of the target, before `fc`."""
    fc_norm: bool
    """An RMSNorm for each of the target's states, before they are concatenated."""
    norm_output: bool
    """The next step of a proposal reads the state after the last norm, not before it."""


def is_head(folder: Path) -> bool:
    """True if a folder's config.json names a drafting method. False where there is no such file."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    return _named_method(read_object(folder / CONFIG_FILE, "")) is not None


def read_head_config(folder: Path) -> HeadConfig:
    """The config of a drafting head.

    Raises:
        ModelFolderError: there is none, its format is unknown, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    method = _named_method(content)
    if method is None:
        raise ModelFolderError(
            f"the file {path} is no drafting head's: speculators_model_type is {content.get(_SPECULATORS_TYPE)!r} and "
            f"architectures is {content.get('architectures')!r}, of which one must name eagle3, as in "
            "LlamaForCausalLMEagle3"
        )
    return _eagle3(path, content, is_wrapped=_SPECULATORS_TYPE in content)


def _named_method(content: Mapping[str, Any]) -> str | None:
    wrapped = content.get(_SPECULATORS_TYPE)
    if wrapped is not None:
        return EAGLE3 if wrapped == EAGLE3 else None
    names = content.get("architectures")
    return _ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and names else None


def _eagle3(path: Path, content: Mapping[str, Any], *, is_wrapped: bool) -> HeadConfig:
    layer = nested(path, content, _LAYER_CONFIG) if is_wrapped else content
    nvidias = content.get("eagle_config")
    flags = {**(nvidias if isinstance(nvidias, dict) else {}), **content}
    check_layer(path, layer, "an EAGLE-3 head")
    hidden_size, heads = size(path, layer, "hidden_size"), size(path, layer, "num_attention_heads")
    vocabulary_size = size(path, layer, "vocab_size")
    return HeadConfig(
        folder=path.parent,
        method=EAGLE3,
        architecture=str((content.get("architectures") or ["Eagle3Speculator"])[0]),
        hidden_size=hidden_size,
        intermediate_size=size(path, layer, "intermediate_size"),
        heads=heads,
        kv_heads=size(path, layer, "num_key_value_heads", heads),
        head_dim=size(path, layer, "head_dim", hidden_size // heads),
        vocabulary_size=vocabulary_size,
        draft_vocabulary_size=size(path, content, "draft_vocab_size", vocabulary_size),
        epsilon=float(layer.get("rms_norm_eps") or 1e-6),
        target_hidden_size=size(path, content, "target_hidden_size", hidden_size),
        aux_layer_ids=_aux_layer_ids(path, flags),
        # vLLM 0.32: absent means true in the speculators format and false in the raw one.
        norm_before_residual=flag(path, flags, "norm_before_residual", default=is_wrapped),
        norm_before_fc=flag(path, flags, "norm_before_fc"),
        fc_norm=flag(path, flags, "fc_norm"),
        norm_output=flag(path, flags, "norm_output"),
    )


def _aux_layer_ids(path: Path, content: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = content.get(_AUX_LAYERS)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(each) is int and each >= 0 for each in ids):
        raise ModelFolderError(
            f"the file {path} should have three layer numbers in {_AUX_LAYERS}, but it is {ids!r}"
        )
    return tuple(ids)
