"""Steps of many long sequences on the fake device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.capture import Work
from tandem.engine.backends.cuda_graphs.captured_steps import CapturedStep, GraphContext
from tandem.engine.backends.eager.backend import EagerBackend
from tandem.engine.backends.trial import scattered_tables
from tandem.engine.kv_cache.arena import KvArena, group_layers, pages_for
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import LoadedModel
from tests.unit.engine.fake_cuda.device import CUDA, Recorder, recording
from tests.unit.engine.fake_cuda.models import MAX_LENGTH

SEQUENCES = 32
WIDTH = 5


class RecordingCapture:
    """A capture whose replay records the work, and allows nothing that a graph cannot hold."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def __call__(self, work: Work) -> Work:
        def replay() -> Tensor:
            with recording(may_copy=False) as self.recorder:
                return work()

        return replay


def new_arena(model: LoadedModel) -> KvArena:
    """Room for all sequences at their longest."""
    groups = len(group_layers(model.layers))
    return KvArena(model.layers, groups * SEQUENCES * pages_for(MAX_LENGTH, 256), model.dtype, CUDA)


def segments(
    model: LoadedModel, counts: SequenceOf[int], end: int = MAX_LENGTH, tokens_ahead: int = 0
) -> list[Segment]:
    """A segment of so many tokens of each sequence, whose last one stands shortly before `end`."""
    windows = [group.window for group in group_layers(model.layers)]
    past = end - tokens_ahead - max(counts)
    tables = scattered_tables([(past, MAX_LENGTH)] * len(counts), 256, windows)
    found = []
    for own, count in zip(tables, counts, strict=True):
        sequence = Sequence(own, MAX_LENGTH, 1000)
        sequence.token_ids = [5] * (end - tokens_ahead)
        sequence.advance(end - tokens_ahead - count)
        found.append(Segment(sequence, count))
    return found


def graph_context(model: LoadedModel, capture: RecordingCapture) -> GraphContext:
    """Without a reference: trials need numbers."""
    reference: Any = SimpleNamespace(limit=1.5, in_spreads=lambda *_: 0.0)
    return GraphContext(model, new_arena(model), reference, (Bucket(SEQUENCES, WIDTH),), capture, MAX_LENGTH)


def captured_step(model: LoadedModel, width: int = WIDTH) -> tuple[Tensor, Recorder]:
    """The logits of a captured step and what it ran."""
    capture = RecordingCapture()
    step = CapturedStep(graph_context(model, capture), Bucket(SEQUENCES, width))
    with torch.inference_mode():
        logits = step.run(segments(model, [width] * SEQUENCES), range(SEQUENCES * width))
    assert capture.recorder is not None
    return logits, capture.recorder


def eager_step(model: LoadedModel, counts: SequenceOf[int]) -> tuple[Tensor, Recorder]:
    """The logits of an eager step of one row for each sequence, and what it ran."""
    parts, ends, total = segments(model, counts), [], 0
    for count in counts:
        total += count
        ends.append(total - 1)
    backend = EagerBackend(model, new_arena(model))
    with recording(may_copy=True) as recorder:
        logits = backend.run(parts, ends)
    return logits, recorder
