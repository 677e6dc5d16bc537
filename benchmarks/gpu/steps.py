"""Steps of one model, and what reading the memory alone would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.device import median_milliseconds
from benchmarks.gpu.figures import DeviceFacts, ModelFigures, StepFigure
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.kv_cache.arena import KvArena, PageTable, page_tokens_on, pages_for
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel, fix_rotary_frequencies


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The steps to measure: every number of sequences with every width and context."""

    sequences: Sequence[int] = (1, 4, 16, 32)
    widths: Sequence[int] = (1, 5)
    """One token, and a proposal of four with the token before it."""
    contexts: Sequence[int] = (1024, 8192)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after its step."""
        return max(self.contexts) + max(self.widths)


def model_figures(model: LoadedModel, sizes: StepSizes, facts: DeviceFacts, rounds: int) -> ModelFigures:
    """Measures a model. Its arena holds the most sequences at the longest context."""
    device = model.device
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    fix_rotary_frequencies(model.module, sizes.longest, device)
    page_count = max(sizes.sequences) * pages_for(sizes.longest + 8, page_tokens_on(device))
    arena = KvArena(model.layers, page_count, model.dtype, device)
    weight_bytes = sum(each.nbytes for each in model.module.parameters())
    measured = _Measured(model, arena, weight_bytes / facts.read_bytes_per_second, facts, rounds)
    steps = tuple(
        measured.step(count, width, context)
        for context in sizes.contexts
        for width in sizes.widths
        for count in sizes.sequences
    )
    taken = torch.cuda.memory_reserved(device) - before if device.type == "cuda" else 0
    return ModelFigures(
        name=model.info.name,
        parameters=model.info.parameter_count,
        weight_bytes=weight_bytes,
        load_bytes=taken,
        steps=steps,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measures the steps of one model."""

    model: LoadedModel
    arena: KvArena
    weight_seconds: float
    facts: DeviceFacts
    rounds: int

    def step(self, count: int, width: int, context: int) -> StepFigure:
        """One size."""
        segments = [self._segment(index, width, context) for index in range(count)]
        rows = range(count * width)
        device = self.model.device
        with torch.inference_mode():
            eager = eager_backend(self.model, self.arena)
            taken = median_milliseconds(lambda: eager.run(segments, rows), device, self.rounds)
        token_bytes = sum(layer.values_per_token for layer in self.model.layers) * self.model.dtype.itemsize
        key_seconds = count * (context + width) * token_bytes / self.facts.read_bytes_per_second
        return StepFigure(
            sequences=count,
            width=width,
            context=context,
            taken=taken,
            bound=1e3 * (self.weight_seconds + key_seconds),
        )

    def _segment(self, index: int, width: int, context: int) -> Segment:
        size = self.arena.page_tokens
        pages = pages_for(context + width, size)
        table = PageTable(size, context + width, range(index * pages, (index + 1) * pages))
        sequence = CachedSequence(table, context + width, self.model.info.vocabulary_size)
        sequence.token_ids = [(7 * step + index) % 200 + 3 for step in range(context + width)]
        sequence.advance(context)  # any keys do: time does not depend on them
        return Segment(sequence, width)
