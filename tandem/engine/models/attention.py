"""The attention function that transformers' models call in place of their own.

A step packs tokens of many sequences into one row, so every layer but attention sees one long batch without padding.
Only attention must distinguish sequences. transformers passes extra keyword arguments of ``model.forward`` on to its
attention function, and this is how the step arrives there. The step stores its keys and values, and each sequence
attends to its own. Models need no cache object and build no mask.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tandem.engine.kv_cache.arena import LayerGeometry

ATTENTION_NAME = "tandem"
"""Registered without a mask function, so that models build no mask."""

PROBE_NAME = "tandem-probe"
"""The same attention with a mask function that returns a layer's window instead of a mask."""

STEP_ARGUMENT = "tandem_step"

_SEES_EVERYTHING = 0
_SEES_SOMETHING_ELSE = -1
"""In place of a window in a probed mask."""
_PROBED_QUERIES = (0, 1, 5, 1_000, 99_999, 131_070)
"""Query positions at which a mask is inspected. No two have the same remainder for any usual chunk size, so that
chunked attention is not mistaken for a window."""


class UnsupportedAttentionError(Exception):
    """A model needs a kind of attention that the packed form lacks; never leaves the engine."""


class Scoring(NamedTuple):
    """The way from scores of queries and keys to weights."""

    scale: float | None = None
    """Factor on the scores; None for key_dim ** -0.5."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """[heads], a score that takes part in the softmax and attends to nothing."""
    mask: Tensor | None = None
    """Result of the model's mask function while it is probed; None when running."""


class AttentionStep(Protocol):
    """One forward pass, as its attention layers see it."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Stores this step's keys and values and attends, for the calling layer with its `layer_idx`.

        Queries are [1, heads, step_tokens, key_dim], keys and values [1, kv_heads, step_tokens, dim]; the result is
        [1, step_tokens, heads, value_dim].
        """


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    tandem_step: AttentionStep | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers, with its signature. `sliding_window` is not among the arguments: not every
    model passes it, but every model has it in its mask, which is looked at when the model is loaded."""
    if tandem_step is None:
        raise UnsupportedAttentionError("the model does not pass keyword arguments down to attention")
    if position_bias is not None:
        raise UnsupportedAttentionError("the model adds a position bias")
    scoring = Scoring(scaling, softcap, s_aux, attention_mask)
    return tandem_step.attend(module, query, key, value, scoring), None


def describe_mask(mask_function: Callable[..., Tensor], **_: object) -> Tensor:
    """Mask function used while a model is probed: returns the window, for `window_of`, in the shape of a mask."""
    queries = torch.tensor(_PROBED_QUERIES)[:, None]
    keys = torch.arange(_PROBED_QUERIES[-1] + 1)[None]
    seen = mask_function(torch.tensor(0), torch.tensor(0), queries, keys)
    window = int(seen[-1].sum())
    if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
        window = _SEES_SOMETHING_ELSE
    elif window == keys.shape[-1]:
        window = _SEES_EVERYTHING
    return torch.full((1, 1, 1, 1), window)


def window_of(mask: Tensor | None) -> int | None:
    """The window that `describe_mask` found: positions a token sees, its own included; None for all before it."""
    if mask is None or mask.dtype != torch.int64 or mask.numel() != 1 or int(mask) == _SEES_SOMETHING_ELSE:
        raise UnsupportedAttentionError("attention is neither causal nor a causal sliding window")
    return None if int(mask) == _SEES_EVERYTHING else int(mask)


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, *, is_causal: bool = False
) -> Tensor:
    """Attention of equally wide blocks of queries, each to its own keys; the result is like `query`, with value_dim
    last.

    `query` is [batch, kv_heads, repeats * width, key_dim]: query heads that share a KV head are rows of one matrix,
    so that grouped-query attention needs no copy of the keys. When `is_causal`, it is [batch, heads, width, key_dim],
    query i sees the keys up to i, and there is no mask. `keys` and `values` are [batch, kv_heads, length, dim], the
    mask of `scoring` [batch or 1, 1, repeats * width, length], its sinks [kv_heads, repeats * width].
    """
    scale, softcap, sinks, mask = scoring
    if softcap is None and sinks is None:
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_causal
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks[None, :, :, None].expand(scores.shape[0], -1, -1, -1).to(scores.dtype)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)


for _name in (ATTENTION_NAME, PROBE_NAME):
    AttentionInterface.register(_name, attention_forward)
AttentionMaskInterface.register(PROBE_NAME, describe_mask)
logger = logging.getLogger(__name__)


def probe(module: Any, device: torch.device) -> tuple[tuple[LayerGeometry, ...], bool]:
    """Runs one token to see what attention is asked for, and sets the attention function accordingly. Returns the
    geometry of each attention layer, by `layer_idx`; and true if tokens of several sequences can share a row. Otherwise
    each sequence has a forward pass of its own, with transformers' attention and masks."""
    try:
        return _probe_packed(module, device), True
    except UnsupportedAttentionError as error:
        found = {"architecture": type(module).__name__, "reason": str(error)}
        logger.warning("attention cannot be packed; sequences run one by one", extra=found)
        return _probe_serial(module, device), False


class _Observer:
    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Records the layer; the numbers it returns are meaningless."""
        index = getattr(module, "layer_idx", None)
        window = window_of(scoring.mask)
        if not isinstance(index, int) or index in self.layers:
            raise UnsupportedAttentionError("attention layers cannot be told apart by layer_idx")
        self.layers[index] = LayerGeometry(key.shape[1], key.shape[3], value.shape[3], window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def in_order(self) -> tuple[LayerGeometry, ...]:
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
    return tuple(_geometry_of(layer) for layer in cache.layers)


def _geometry_of(layer: object) -> LayerGeometry:
    """A layer of transformers' cache over all tokens; transformers' masks handle windows."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedAttentionError(f"a layer keeps a {type(layer).__name__}")
    keys = getattr(layer, "keys", None)
    values = getattr(layer, "values", None)
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
