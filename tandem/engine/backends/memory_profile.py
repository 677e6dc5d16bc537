"""Memory of a GPU that an engine needs beside weights and keys, measured before the KV cache takes the rest.

As vLLM does, the largest step is run once and the most memory that it held is left free. CUDA graphs keep memory of
their own, for which room is left as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.static_step import StaticStep
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.eager.sampler import TORCH_SAMPLER
from tandem.engine.kv_cache.arena import KvArena, PageTable, memory_allowance, pages_for
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import LoadedModel
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError
from tandem.types import SamplingParams

logger = logging.getLogger(__name__)

_GRAPH_BYTES = 16 << 20
"""Left for each CUDA graph beside what its step computes: the driver keeps every node of it. Assumed, not measured."""

_COSTLIEST_DRAW = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01)
"""Sorts the vocabulary."""


class MemoryMeter(Protocol):
    """Reads the memory of a device."""

    def allowance(self, share: float | None) -> int:
        """Bytes that this process may take beside what it holds; see `tandem.engine.kv_cache.arena`."""
        ...

    def begin(self) -> None:
        """Gives unused memory back and forgets the peak."""
        ...

    def held_bytes(self) -> int:
        """Memory that this process has taken of the device."""
        ...

    def peak_bytes(self) -> int:
        """The most of it since `begin`."""
        ...


class CudaMeter:
    """Memory that torch's allocator has taken of a GPU, whole blocks: more than what its tensors fill."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allowance(self, share: float | None) -> int:
        """See `MemoryMeter`."""
        return memory_allowance(share, self._device)

    def begin(self) -> None:
        """See `MemoryMeter`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def held_bytes(self) -> int:
        """See `MemoryMeter`."""
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        return torch.cuda.max_memory_reserved(self._device)


def meter_of(device: torch.device) -> MemoryMeter | None:
    """The meter of a device; None for a CPU, whose memory needs no such care."""
    return CudaMeter(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How an engine divides its share of a device."""

    settings: EngineSettings
    """With the size of the KV cache."""
    graph_bytes: int | None = None
    """Left for CUDA graphs; None where nothing was measured."""

    def check(self, graph_bytes: int) -> None:
        """Logs a warning if the captured graphs take more than was left for them."""
        if self.graph_bytes is not None and graph_bytes > self.graph_bytes:
            logger.warning(
                "the captured graphs take more memory than was left for them",
                extra={"graph_bytes": graph_bytes, "left_bytes": self.graph_bytes},
            )


def plan_memory(
    model: LoadedModel,
    settings: EngineSettings,
    max_length: int,
    buckets: SequenceOf[Bucket],
    meter: MemoryMeter | None,
) -> MemoryPlan:
    """Measures what the engine's steps need, and gives the rest of its share to the KV cache.

    Args:
        model: on its device, with the layers that will run.
        settings: limits of the engine. A given `kv_cache_bytes` stays, and nothing is measured.
        max_length: longest sequence, in tokens.
        buckets: the shapes of the steps that will be captured.
        meter: None measures nothing.

    Raises:
        ConfigurationError: the largest step does not fit beside the weights.
    """
    if meter is None or settings.kv_cache_bytes is not None:
        return MemoryPlan(settings)
    try:
        with torch.inference_mode():
            activations, graphs = _needs(model, settings, max_length, buckets, meter)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"A step of {settings.prefill_chunk_tokens} prompt tokens beside {settings.max_sequences} sequences does "
            "not fit into the device's memory together with the weights; lower max_num_batched_tokens or max_sequences."
        ) from error
    meter.begin()
    weights = meter.held_bytes()
    cache = max(meter.allowance(settings.device_memory_utilization) - activations - graphs, 1)
    logger.info(
        "memory planned",
        extra={
            "weight_bytes": weights, "activation_bytes": activations, "graph_bytes": graphs, "kv_cache_bytes": cache,
        },
    )  # fmt: skip
    return MemoryPlan(replace(settings, kv_cache_bytes=cache), graphs)


def _needs(
    model: LoadedModel,
    settings: EngineSettings,
    max_length: int,
    buckets: SequenceOf[Bucket],
    meter: MemoryMeter,
) -> tuple[int, int]:
    """Bytes that the largest step takes beside its keys and values, and bytes for the graphs."""
    # All sequences lie in the same page: what is computed is of no use, and takes the same memory.
    arena = KvArena(model.layers, 1, model.dtype, model.device)
    segments, rows = _largest_step(settings, max_length, model.info.vocabulary_size, arena)
    meter.begin()
    before = meter.held_bytes()
    logits = eager_backend(model, arena).run(segments, rows)
    probs = TORCH_SAMPLER.probabilities(logits, [_COSTLIEST_DRAW] * len(rows))
    TORCH_SAMPLER.sample_tokens(probs, torch.arange(len(rows), device=model.device))
    activations = meter.peak_bytes() - before
    del logits, probs
    if not buckets or not model.is_packed:
        return activations, 0
    meter.begin()
    before = meter.held_bytes()
    _run_static(model, arena, max(buckets), max_length)
    # The graphs share one pool, and only one of them runs at a time.
    return activations, meter.peak_bytes() - before + len(buckets) * _GRAPH_BYTES


def _largest_step(
    settings: EngineSettings, max_length: int, vocabulary_size: int, arena: KvArena
) -> tuple[list[Segment], list[int]]:
    """A chunk of a prompt at the end of the longest sequence, beside verifications of all others; and their rows."""
    width = min(max(settings.captured_widths, default=1), max_length)
    chunk = max(min(settings.prefill_chunk_tokens, max_length), width)
    segments: list[Segment] = []
    rows: list[int] = []
    end = 0
    for index in range(settings.max_sequences):
        past, count = (max_length - chunk, chunk) if index == 0 else (0, width)
        pages = [0] * pages_for(past + count, arena.page_tokens)
        tables = [PageTable(arena.page_tokens, max_length, pages, window) for window in arena.windows]
        sequence = Sequence(tables, max_length, vocabulary_size)
        sequence.token_ids = [step % vocabulary_size for step in range(past + count)]
        sequence.advance(past)
        segments.append(Segment(sequence, count))
        end += count
        rows += range(end - width, end)
    return segments, rows


def _run_static(model: LoadedModel, arena: KvArena, bucket: Bucket, max_length: int) -> None:
    """Runs the work of the largest captured step."""
    device, count = model.device, bucket.sequences
    table_shape = (arena.group_count, count, pages_for(max_length, arena.page_tokens))
    step = StaticStep(model, arena, bucket, max_length)
    step.logits(
        torch.zeros(count, bucket.width, dtype=torch.int64, device=device),
        torch.zeros(table_shape, dtype=torch.int32, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.full((count,), bucket.width, dtype=torch.int64, device=device),
    )
