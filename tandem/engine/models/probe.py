"""Probes a loaded model's attention by running one token instead of reading names in its config."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tandem.engine.kv_cache.layer_groups import LayerGeometry
from tandem.engine.models.attention import (
    ATTENTION_NAME,
    PROBE_NAME,
    STEP_ARGUMENT,
    UnsupportedAttentionError,
    window_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """How a model can be run."""

    layers: tuple[LayerGeometry, ...]
    """Geometry of each attention layer, by `layer_idx`."""
    is_packed: bool
    """True if tokens of several sequences can share a row. Otherwise each sequence has a forward pass of its own,
    with transformers' attention and masks."""


def probe(module: Any, device: torch.device) -> Anatomy:
    """Runs one token to see what attention is asked for, and sets the attention function accordingly.

    Args:
        module: a transformers causal language model.
        device: where it is.

    Raises:
        UnsupportedAttentionError: the cache of some layer is more than keys and values by position.
    """
    try:
        layers = _probe_packed(module, device)
    except UnsupportedAttentionError as error:
        logger.warning(
            "attention cannot be packed; sequences run one by one",
            extra={"architecture": type(module).__name__, "reason": str(error)},
        )
        return Anatomy(_probe_serial(module, device), is_packed=False)
    return Anatomy(layers, is_packed=True)


class _Observer:
    """A step that only looks: which layers call attention, and with what."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Records the layer; the numbers it returns are meaningless."""
        layer_index = getattr(module, "layer_idx", None)
        if not isinstance(layer_index, int) or layer_index in self.layers:
            raise UnsupportedAttentionError("attention layers cannot be told apart by layer_idx")
        self.layers[layer_index] = LayerGeometry(key.shape[1], key.shape[3], value.shape[3], window_of(mask))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def in_order(self) -> tuple[LayerGeometry, ...]:
        """The layers by index."""
        if sorted(self.layers) != list(range(len(self.layers))) or not self.layers:
            raise UnsupportedAttentionError("not every layer calls the attention function")
        return tuple(self.layers[index] for index in range(len(self.layers)))


def _probe_packed(module: Any, device: torch.device) -> tuple[LayerGeometry, ...]:
    if not module._can_set_attn_implementation():
        raise UnsupportedAttentionError("the model has attention of its own")
    observer = _Observer()
    module.set_attn_implementation(PROBE_NAME)
    with torch.inference_mode():
        module(**_one_token(module, device), use_cache=False, **{STEP_ARGUMENT: observer})
    module.set_attn_implementation(ATTENTION_NAME)
    return observer.in_order()


def _probe_serial(module: Any, device: torch.device) -> tuple[LayerGeometry, ...]:
    if module._can_set_attn_implementation():
        module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        module(**_one_token(module, device), use_cache=True, past_key_values=cache)
    return tuple(_stored(layer) for layer in cache.layers)


def _stored(layer: object) -> LayerGeometry:
    """A layer of transformers' cache over all tokens; transformers' masks handle windows."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedAttentionError(f"a layer keeps a {type(layer).__name__}")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        raise UnsupportedAttentionError("a layer keeps nothing")
    return LayerGeometry(keys.shape[1], keys.shape[3], values.shape[3])


def forward_arguments(module: Any, **arguments: Tensor) -> dict[str, Tensor]:
    """Those of the arguments that the model's forward takes: models with relative positions take no position_ids."""
    known = inspect.signature(module.forward).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _one_token(module: Any, device: torch.device) -> dict[str, Tensor]:
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    return forward_arguments(module, input_ids=zero, position_ids=zero)
