"""Replaces layers of the Llama family by fused ones, if the model is one and they pass their trial."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.fused.layers import FusedAttention, FusedMlp, FusedNorm, FusedRotary
from tandem.engine.backends.trial import DistrustedError, Reference, trusted
from tandem.engine.models.loading import LoadedModel

logger = logging.getLogger(__name__)

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""transformers' folder and the beginning of its classes' names."""

_Replacements = list[tuple[nn.Module, str, nn.Module]]
"""Parent, attribute, and the module that was or is to be there."""


def fuse(model: LoadedModel) -> Reference | None:
    """Replaces the model's layers in place.

    Returns:
        The logits of the trial steps by the layers as they were; None if they stay, which a log line explains if they
        could have been replaced.
    """
    if not model.is_packed or not is_fusible(model.module):
        return None
    originals: _Replacements = []
    try:
        reference = trusted(lambda: Reference(model), lambda _: 0.0, 0.0)
        trusted(
            lambda: replace_layers(model.module, originals),
            lambda _: reference.error_of(eager_backend),
            reference.limit,
        )
    except DistrustedError as error:
        for parent, name, original in originals:
            setattr(parent, name, original)
        logger.warning("layers are not fused", extra={"reason": str(error)})
        return None
    logger.info("layers fused", extra={"replaced": len(originals)})
    return reference


def is_fusible(module: Any) -> bool:
    """True if every layer is exactly of the Llama family. Subclasses and hooks may do anything else."""
    if not _is(module, "ForCausalLM"):
        return False
    body = module.model
    return (
        _is(body.norm, "RMSNorm")
        and _is(body.rotary_emb, "RotaryEmbedding")
        and all(map(_is_fusible_layer, body.layers))
    )


def _is_fusible_layer(layer: Any) -> bool:
    return (
        _is(layer, "DecoderLayer")
        and _is(layer.self_attn, "Attention")
        and _is(layer.mlp, "MLP")
        and _is(layer.input_layernorm, "RMSNorm")
        and _is(layer.post_attention_layernorm, "RMSNorm")
        and _are_mergeable(layer.self_attn, "q_proj", "k_proj", "v_proj")
        and _are_mergeable(layer.mlp, "gate_proj", "up_proj")
        and _has_equal_norms(layer.self_attn)
    )


def _is(module: Any, kind: str) -> bool:
    """True if the module is exactly of this kind. transformers' other models are not imported to find out."""
    found = type(module)
    return not module._forward_hooks and any(
        found.__module__ == f"transformers.models.{folder}.modeling_{folder}"
        and found.__qualname__ == beginning + kind
        for folder, beginning in _FAMILIES.items()
    )


def _are_mergeable(parent: Any, *names: str) -> bool:
    linears = [getattr(parent, name) for name in names]
    if not all(type(linear) is nn.Linear and not linear._forward_hooks for linear in linears):
        return False
    return len({(linear.bias is None, linear.weight.dtype, linear.in_features) for linear in linears}) == 1


def _has_equal_norms(attention: Any) -> bool:
    """True if query and key are normed alike, or not at all."""
    norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    if not norms:
        return True
    return (
        len(norms) == 2
        and all(_is(norm, "RMSNorm") and norm.weight.shape == (attention.head_dim,) for norm in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon
    )


def replace_layers(module: Any, originals: _Replacements) -> None:
    """Puts the fused layers in place, one layer after the other: no more than one is in memory twice.

    Args:
        module: `is_fusible`.
        originals: what was replaced is added, so that it can be put back.
    """
    for parent, name, make in _places(module):
        original = getattr(parent, name)
        fused = make(original)
        originals.append((parent, name, original))
        setattr(parent, name, fused)


def _places(module: Any) -> Iterator[tuple[nn.Module, str, type[nn.Module]]]:
    body = module.model
    for layer in body.layers:
        yield layer, "input_layernorm", FusedNorm
        yield layer, "self_attn", FusedAttention
        yield layer, "post_attention_layernorm", FusedNorm
        yield layer, "mlp", FusedMlp
    yield body, "norm", FusedNorm
    yield body, "rotary_emb", FusedRotary
