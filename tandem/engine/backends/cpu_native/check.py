"""Compares the compiled kernels with torch before anything is served: a compiler's mistake must not become a text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.layers import NativeAttention, NativeLayout, packed
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.operations import kernel_calls
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, LayerGeometry, PageTable, pages_for
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.attention import grouped_attention
from tandem.sampling.noise import sample
from tandem.sampling.warping import warp
from tandem.types import SamplingParams

_aten: Any = torch.ops.aten

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Greatest difference, relative to the greatest number."""

_ROWS = (1, 2, 3, 5, 9, 13, 16)
_LINEAR_SHAPES = ((70, 37), (64, 96))
_KV_HEADS, _REPEATS, _KEY_DIM, _VALUE_DIM = 2, 3, 24, 20
_LENGTHS = ((0, 3), (17, 1), (62, 5), (130, 1))
"""Tokens that a sequence had, and tokens of the step. The steps of some, and the windows, cross the end of a page."""
_VARIANTS = ((None, None), (7, None), (None, 5.0))
"""Windows and soft caps."""
_TEMPERATURES = (0.4, 1.0, 1.7)
_VOCABULARY, _TOP_K = 301, 20


def mismatch(kernels: Kernels) -> str:
    """Errors of the kernels, in words; empty when there are none."""
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for dtype in _TOLERANCES:
            for outputs, inputs in _LINEAR_SHAPES:
                if not all(
                    _linear_agrees(kernels, dtype, rows, outputs, inputs, generator) for rows in _ROWS
                ):
                    return f"linear layer, {dtype}, {outputs} x {inputs}"
            for window, softcap in _VARIANTS:
                if not _attention_agrees(kernels, dtype, window, softcap, generator):
                    return f"attention, {dtype}, window {window}, soft cap {softcap}"
            if not _sampling_agrees(kernels, dtype, generator):
                return f"sampling, {dtype}"
            for target, *arguments in _small_operations(dtype, generator):
                if not _operation_agrees(kernels, target, arguments, dtype):
                    return f"{target}, {dtype}"
    return ""


def _linear_agrees(
    kernels: Kernels, dtype: torch.dtype, rows: int, outputs: int, inputs: int, generator: torch.Generator
) -> bool:
    values = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    results = kernels.linear(values, packed(weight, kernels.block), bias.float(), outputs)
    return _close(results, torch.nn.functional.linear(values.float(), weight.float(), bias.float()), dtype)


def _attention_agrees(
    kernels: Kernels,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    generator: torch.Generator,
) -> bool:
    geometry = LayerGeometry(_KV_HEADS, _KEY_DIM, _VALUE_DIM, window)
    device = torch.device("cpu")
    longest = pages_for(max(map(sum, _LENGTHS)), PAGE_TOKENS)
    arena = KvArena([geometry], longest * len(_LENGTHS), dtype, device)
    for stored in (arena.layers[0].keys, arena.layers[0].values):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    segments = [_segment(arena, index, *lengths) for index, lengths in enumerate(_LENGTHS)]
    tokens, heads = sum(segment.token_count for segment in segments), _KV_HEADS * _REPEATS
    query = torch.randn(1, heads, tokens, _KEY_DIM, generator=generator).to(dtype)
    key = torch.randn(1, _KV_HEADS, tokens, _KEY_DIM, generator=generator).to(dtype)
    value = torch.randn(1, _KV_HEADS, tokens, _VALUE_DIM, generator=generator).to(dtype)
    layout = NativeLayout(segments, NativeAttention(kernels, arena, (geometry,)))
    module: torch.nn.Module = SimpleNamespace(layer_idx=0)  # type: ignore[assignment]  # all that is looked at
    results = layout.attend(module, query, key, value, mask=None, scale=None, softcap=softcap, sinks=None)
    first = 0
    for segment in segments:
        part = slice(first, first + segment.token_count)
        expected = _plain_attention(arena, segment, query[:, :, part], key[:, :, part], value[:, :, part], window,
                                    softcap)  # fmt: skip
        if not _close(results[:, part], expected, dtype):
            return False
        first = part.stop
    return True


def _sampling_agrees(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> bool:
    logits = (4.0 * torch.randn(len(_TEMPERATURES), _VOCABULARY, generator=generator)).to(dtype)
    sampling = [SamplingParams(temperature) for temperature in _TEMPERATURES]
    probs = warp(logits, sampling)
    keys = torch.randint(1 << 62, (len(sampling),), generator=generator)
    values, columns = kernels.topk(logits, _TOP_K)
    some_probs = probs[:, columns[0]]
    return (
        torch.allclose(kernels.probabilities(logits, _TEMPERATURES), probs, rtol=1e-12, atol=0.0)
        and torch.equal(kernels.sample(probs, keys), sample(probs, keys))
        and torch.equal(kernels.sample(some_probs, keys, columns), sample(some_probs, keys, columns))
        and torch.equal(values, logits.float().topk(_TOP_K).values)
        and torch.equal(values, logits.float().gather(1, columns))
    )  # fmt: skip


def _small_operations(dtype: torch.dtype, generator: torch.Generator) -> list[tuple[Any, ...]]:
    values = torch.randn(1, 5, 70, generator=generator).to(dtype)
    other = torch.randn(70, generator=generator).to(dtype)
    turned = values.view(1, 5, 7, 10).transpose(1, 2)
    return [
        (_aten.add.Tensor, values, other), (_aten.add.Tensor, values, 0.375), (_aten.mul.Tensor, turned, other[:10]),
        (_aten.neg.default, turned), (_aten.silu.default, values), (_aten.pow.Tensor_Scalar, values, 2),
        (_aten.rsqrt.default, values.abs() + 0.1), (_aten.mean.dim, values.float(), [-1], True),
        (_aten._to_copy.default, values), (_aten.cat.default, [turned, turned[..., :3]], -1),
        (_aten.embedding.default, values[0], torch.tensor([[4, 0, 2]])),
    ]  # fmt: skip


def _operation_agrees(kernels: Kernels, target: Any, arguments: list[Any], dtype: torch.dtype) -> bool:
    expected = target(*arguments)
    output = torch.full_like(expected, float("nan"))
    kernels.run(*kernel_calls(target, tuple(arguments), {}, output))
    return _close(output, expected.float(), dtype)


def _segment(arena: KvArena, index: int, computed: int, count: int) -> Segment:
    """A sequence whose pages lie apart, so that a kernel that overlooks the table reads those of others."""
    length = computed + count
    pages = range(index, arena.page_count, len(_LENGTHS))[: pages_for(length, arena.page_tokens)]
    sequence = Sequence(PageTable(arena.page_tokens, length, pages), length, 1)
    sequence.token_ids = [0] * length
    sequence.advance(computed)
    return Segment(sequence, count)


def _plain_attention(
    arena: KvArena,
    segment: Segment,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The reference in torch, float32; [1, tokens, heads, value_dim]."""
    slots = torch.from_numpy(segment.sequence.table.slots(0, segment.start))

    def with_past(stored: Tensor, new: Tensor) -> Tensor:
        past = stored.flatten(0, 1)[slots].transpose(0, 1)[None]
        return torch.cat((past, new), dim=2).float().repeat_interleave(_REPEATS, dim=1)

    queries = torch.arange(segment.start, segment.end)[:, None]
    positions = torch.arange(segment.end)[None]
    hidden = (positions > queries) | (positions <= queries - (window or segment.end))
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None]
    output = grouped_attention(
        query.float(), with_past(arena.layers[0].keys, key), with_past(arena.layers[0].values, value), mask=mask,
        is_causal=False, scale=None, softcap=softcap, sinks=None,
    )  # fmt: skip
    return output.transpose(1, 2)


def _close(results: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (results.float() - expected).abs().max()
    return bool(difference <= _TOLERANCES[dtype] * expected.abs().max())  # false for NaN, too
