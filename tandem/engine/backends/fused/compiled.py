"""Layers compiled by `torch.compile`, one region for all of them: what lies before attention and what lies after.

Attention stays as it is: it reads the step, whose tables and counts differ each time, and breaks the region in two.
Layers are compiled for any number of tokens and before graphs are captured, which then hold the compiled kernels.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.fused.layers import FusedAttention
from tandem.engine.backends.trial import DistrustedError, Reference, trial_segments, trusted
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.models.attention import ATTENTION_NAME, attention_forward
from tandem.engine.models.loading import LoadedModel

logger = logging.getLogger(__name__)


def compile_layers(
    model: LoadedModel, reference: Reference | None = None, backend: str = "inductor"
) -> Reference | None:
    """Compiles the model's layers in place, and compares them with the layers as they were.

    Args:
        model: its layers may be fused.
        reference: the logits of the trial steps by the layers as they were loaded; None computes them.
        backend: of `torch.compile`; inductor needs a C++ compiler, and Triton on a GPU.

    Returns:
        The reference, also if the layers stay as they are, which a log line then explains.
    """
    started = time.perf_counter()
    layers: list[nn.Module] = []
    try:
        reference = reference or trusted(lambda: Reference(model), lambda _: 0.0, 0.0)
        known = reference
        layers = _layers_of(model)
        trusted(lambda: _compile(layers, backend), lambda _: _error_of(model, known), reference.limit)
    except DistrustedError as error:
        _use_attention(layers, attention_forward)
        for layer in layers:
            layer._compiled_call_impl = None
        logger.warning("layers are not compiled", extra={"reason": str(error)})
        return reference
    seconds = round(time.perf_counter() - started, 3)
    logger.info("layers compiled", extra={"layers": len(layers), "seconds": seconds})
    return reference


def _error_of(model: LoadedModel, reference: Reference) -> float:
    """The error of the compiled layers, in spreads; steps of one token are compiled as well."""
    arena = KvArena(model.layers, 1, model.dtype, model.device)
    try:
        with (
            torch.inference_mode(),
            trial_segments(arena, model.info.vocabulary_size, [(0, 1)], model.dtype) as segments,
        ):
            eager_backend(model, arena).run(segments, [0])
        return reference.error_of(eager_backend)
    except Exception as error:
        # torch wraps a compiler's own error in one whose first line says nothing.
        raise getattr(error, "inner_exception", error) from error


def _layers_of(model: LoadedModel) -> list[nn.Module]:
    """The model's layers, first one first.

    Raises:
        DistrustedError: the model has no list of them.
    """
    for module in model.module.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(model.layers):
            return list(module)
    raise DistrustedError("the model has no list of its layers")


def _compile(layers: list[nn.Module], backend: str) -> None:
    _use_attention(layers, torch.compiler.disable(attention_forward))  # type: ignore[no-untyped-call]
    for layer in layers:
        # A step may have any number of tokens; only that of one token is compiled separately.
        layer.compile(backend=backend, dynamic=True)


def _use_attention(layers: list[nn.Module], forward: Any) -> None:
    """Makes transformers' own modules and fused ones call this function for attention."""
    AttentionInterface.register(ATTENTION_NAME, forward)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, FusedAttention):
                module.attention_forward = forward
