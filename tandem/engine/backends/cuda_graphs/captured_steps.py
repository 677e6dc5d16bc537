"""The model's step, captured for each bucket and compared with the eager step before it is trusted."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.capture import Capture, CaptureOutcome, capture_each
from tandem.engine.backends.cuda_graphs.static_inputs import StaticInputs
from tandem.engine.backends.cuda_graphs.static_step import StaticStep
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.trial import Lengths, Reference, trial_segments
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import LoadedModel

_PAST_TOKENS = 24
"""Keys of all sequences in a trial except the first, which gets as many as the model and the arena hold."""


@dataclass(frozen=True, slots=True)
class GraphContext:
    """Everything that capturing the steps of an engine takes."""

    model: LoadedModel
    arena: KvArena
    reference: Reference
    buckets: SequenceOf[Bucket]
    """The shapes of the engine's steps."""
    capture: Capture
    max_length: int
    """Longest sequence, in tokens."""


class CapturedStep:
    """A bucket's step: padded, replayed, and its wanted rows handed out."""

    def __init__(self, context: GraphContext, bucket: Bucket) -> None:
        self.bucket = bucket
        self._spare_page = context.arena.spare_page
        self._inputs = StaticInputs(
            bucket,
            context.max_length,
            extra=bucket.token_count,
            device=context.model.device,
            group_count=context.arena.group_count,
        )
        self._step = StaticStep(context.model, context.arena, bucket, context.max_length)
        self._replay = context.capture(self._work)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """Runs the step.

        Args:
            segments: at most as many and as wide as the bucket's.
            rows: indices of the tokens whose logits are wanted, counted as if they were packed without padding.

        Returns:
            [len(rows), vocabulary_size]; valid until the next step.
        """
        self._inputs.fill(segments, _padded(rows, segments, self.bucket.width), self._spare_page)
        return self._replay()[: len(rows)]

    def _work(self) -> Tensor:
        inputs = self._inputs
        logits = self._step.logits(inputs.token_ids, inputs.page_tables, inputs.starts, inputs.widths)
        return logits.index_select(0, inputs.extra)


def _padded(rows: SequenceOf[int], segments: SequenceOf[Segment], width: int) -> list[int]:
    """Indices of the rows after each segment is padded to the width."""
    places = [
        i * width + offset for i, segment in enumerate(segments) for offset in range(segment.token_count)
    ]
    return [places[row] for row in rows]


class CapturedSteps:
    """The step backend of all buckets that could be captured and were found right."""

    def __init__(self, context: GraphContext) -> None:
        """Captures; the arena must be empty."""
        self.outcomes: list[CaptureOutcome]
        """Which buckets were captured, and why the others were not."""
        with torch.inference_mode():
            self._steps, self.outcomes = capture_each(
                "steps",
                context.buckets,
                lambda bucket: CapturedStep(context, bucket),
                lambda step: _error_of(step, context),
                context.reference.limit,
                context.model.device,
            )

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """See `StepBackend`. All is set up by the capture."""
        return ()

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`."""
        return limit

    def accepts(self, segments: SequenceOf[Segment]) -> bool:
        """True if the segments fit a bucket."""
        return self._fitting(segments) is not None

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`."""
        step = self._fitting(segments)
        if step is None:
            raise ValueError("no captured step holds these segments")
        return step.run(segments, rows)

    def _fitting(self, segments: SequenceOf[Segment]) -> CapturedStep | None:
        """The smallest step that holds the segments."""
        width = max(segment.token_count for segment in segments)
        return next((step for step in self._steps if step.bucket.holds(len(segments), width)), None)


def trial_lengths(bucket: Bucket, arena: KvArena, max_length: int, tokens_ahead: int = 0) -> list[Lengths]:
    """As many sequences of a bucket's width as it and the arena hold, one of them as long as both allow."""
    size, width, ahead = arena.page_tokens, bucket.width, bucket.width + tokens_ahead
    longest = max(max_length - ahead, 0)
    short = min(_PAST_TOKENS, longest)
    pages = arena.kept_pages(short, short + ahead)
    count = min(bucket.sequences, arena.page_count // pages)
    room = arena.page_count - (count - 1) * pages
    long = longest
    while long > short and arena.kept_pages(long, long + ahead) > room:
        long = max(short, (long + ahead - 1) // size * size - ahead)  # a page less
    return [(long, width), *[(short, width)] * (count - 1)]


def _error_of(step: CapturedStep, context: GraphContext) -> float:
    """The error of a captured step against the eager one, in spreads."""
    model, arena = context.model, context.arena
    lengths = trial_lengths(step.bucket, arena, context.max_length)
    with trial_segments(arena, model.info.vocabulary_size, lengths, model.dtype) as segments:
        rows = range(sum(segment.token_count for segment in segments))
        eager = eager_backend(model, arena).run(segments, rows)
        return context.reference.in_spreads(step.run(segments, rows), eager)
