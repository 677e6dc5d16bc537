"""Steps of a few sequences in scattered pages, run by a backend without an engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine.backends.interface import StepBackend
from tandem.engine.backends.trial import scattered_tables
from tandem.engine.kv_cache.arena import KvArena, group_layers
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import LoadedModel, load_model
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
        """Fills the arena with NaN, the spare page included."""
        for layer in self.arena.layers:
            layer.keys.fill_(float("nan"))
            layer.padded_values.fill_(float("nan"))

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


def naive_varlen_for(calls: list[dict[str, Any]]) -> Callable[[Tensor, Tensor], Any]:
    """In place of `varlen_for`: as on a GPU, but for any dtype."""
    return lambda keys, values: naive_varlen(calls) if keys.shape[-1] == values.shape[-1] else None


def naive_varlen(calls: list[dict[str, Any]]) -> Callable[..., Tensor]:
    """`varlen_attn` as torch documents it, one query after the other; it records its arguments."""

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        key_starts: Tensor | None,
        max_q: int,
        max_k: int,
        **named: Any,
    ) -> Tensor:
        calls.append(named | {"max_q": max_q, "max_k": max_k})
        lengths, table = named["seqused_k"], named["block_table"]
        assert starts.dtype == lengths.dtype == table.dtype == torch.int32
        assert len(starts) == len(lengths) + 1 == len(table) + 1
        assert int(starts.diff().max()) <= max_q
        assert int(lengths.max()) <= max_k
        assert query.stride(-1) == keys.stride(-1) == 1
        repeats = query.shape[1] // keys.shape[2]
        assert named["enable_gqa"] == (repeats > 1)
        left, right = named["window_size"]
        assert right == 0
        output = torch.full_like(query, float("nan"))  # rows of no sequence stay as they were
        for index, length in enumerate(lengths.tolist()):
            first, end = starts[index : index + 2].tolist()
            own_keys = keys[table[index].long()].flatten(0, 1)[:length].repeat_interleave(repeats, dim=1)
            own_values = values[table[index].long()].flatten(0, 1)[:length].repeat_interleave(repeats, dim=1)
            for row in range(first, end):
                position = length - (end - row)
                seen = slice(0 if left < 0 else max(0, position - left), max(0, position + 1))
                scale = query.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
                scores = torch.einsum("hd,khd->hk", query[row], own_keys[seen]) * scale
                output[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), own_values[seen])
        return output

    return attend
