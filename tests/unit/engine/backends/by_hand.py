"""Steps of a few sequences in scattered pages, run by a backend without an engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine.backends.trial import scattered_tables
from tandem.engine.kv_cache.arena import KvArena, group_layers
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.steps import StepBackend
from tests.unit.engine.greedy import plain_logits
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

PAGES = (3, 1, 2, 2)
"""Of each sequence."""


class ByHand:
    """A model beside transformers' own, with sequences in an arena of its own."""

    def __init__(self, folder: Path, family: str) -> None:
        self.reference: Any = save_checkpoint(folder, CONFIGS[family]())
        self.model: LoadedModel = load_model(folder, dtype="float32")
        self.arena = self.new_arena()
        size = self.arena.page_tokens
        tables = scattered_tables([(0, count * size) for count in PAGES], size, self.arena.windows)
        vocabulary_size = self.model.info.vocabulary_size
        self.sequences = [Sequence(own, own[0].capacity, vocabulary_size) for own in tables]

    def new_arena(self) -> KvArena:
        count = sum(PAGES) * len(group_layers(self.model.layers))
        arena = KvArena(self.model.layers, count, self.model.dtype, self.model.device)
        for layer in arena.layers:
            layer.keys.zero_()
            layer.values.zero_()
        return arena

    def poison(self) -> None:
        """Fills the arena with NaN."""
        for layer in self.arena.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))

    def step(self, backend: StepBackend, tokens: SequenceOf[SequenceOf[int]]) -> list[Tensor]:
        """Runs more tokens of each sequence that has some, all rows wanted; returns each one's logits."""
        segments = []
        for sequence, more in zip(self.sequences, tokens, strict=False):
            if more:
                sequence.token_ids.extend(more)
                segments.append(Segment(sequence, len(more)))
        counts = [segment.token_count for segment in segments]
        with torch.inference_mode():
            logits = backend.run(segments, range(sum(counts))).clone()
        for segment in segments:
            segment.sequence.advance(segment.token_count)
        return list(torch.split(logits, counts))

    def check(self, backend: StepBackend, steps: SequenceOf[SequenceOf[SequenceOf[int]]]) -> None:
        """Runs steps and compares all of their logits with transformers'."""
        for tokens in steps:
            found = self.step(backend, tokens)
            running = [sequence for sequence, more in zip(self.sequences, tokens, strict=False) if more]
            for sequence, logits in zip(running, found, strict=True):
                expected = plain_logits(self.reference, sequence.token_ids)[-len(logits) :]
                assert torch.allclose(logits, expected, atol=1e-3), sequence.table.pages


def some_tokens(count: int, offset: int = 0) -> list[int]:
    """Any tokens."""
    return [3 + (7 * step + offset) % 90 for step in range(count)]
