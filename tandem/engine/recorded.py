"""The model's step, recorded for each bucket and compared with the plain step before it is trusted."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from tandem.engine.attention import STEP_ARGUMENT
from tandem.engine.buckets import Bucket
from tandem.engine.cache import KvArena
from tandem.engine.layout import Packing, StepLayout
from tandem.engine.model import LoadedModel
from tandem.engine.recording import Recorder
from tandem.engine.segment import Segment
from tandem.engine.static_step import StaticInputs, StaticStep
from tandem.engine.trials import TOLERANCES, trial

logger = logging.getLogger(__name__)


class RecordedStep:
    """A bucket's step: padded, played, and its wanted rows handed out."""

    def __init__(self, model: LoadedModel, arena: KvArena, bucket: Bucket, recorder: Recorder) -> None:
        self.bucket = bucket
        self._spare = arena.total_tokens
        self._inputs = StaticInputs(bucket, extra=bucket.token_count, device=model.device)
        self._step = StaticStep(model, arena, bucket)
        self._play = recorder(self._work)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """The step.

        Args:
            segments: at most as many and as wide as the bucket's.
            rows: indices of the tokens whose logits are wanted, counted as if they were packed without padding.

        Returns:
            [len(rows), vocabulary_size]; valid until the next step.
        """
        self._inputs.fill(segments, _padded(rows, segments, self.bucket.width), self._spare)
        return self._play()[: len(rows)]

    def _work(self) -> Tensor:
        inputs = self._inputs
        logits = self._step.logits(inputs.token_ids, inputs.bases, inputs.starts, inputs.widths)
        return logits.index_select(0, inputs.extra)


def _padded(rows: SequenceOf[int], segments: SequenceOf[Segment], width: int) -> list[int]:
    """Where the rows are once each segment is padded to the width."""
    places = [
        i * width + offset for i, segment in enumerate(segments) for offset in range(segment.token_count)
    ]
    return [places[row] for row in rows]


class RecordedPacking(Packing):
    """Segments that a recorded step runs."""

    def __init__(self, segments: SequenceOf[Segment], step: RecordedStep) -> None:
        super().__init__(segments)
        self._step = step

    def run(self, rows: SequenceOf[int]) -> Tensor:
        """See `RecordedStep.run`."""
        return self._step.run(self.segments, rows)


class RecordedSteps:
    """All that could be recorded and was found right."""

    def __init__(
        self, model: LoadedModel, arena: KvArena, buckets: SequenceOf[Bucket], recorder: Recorder
    ) -> None:
        self._steps: list[RecordedStep] = []
        with torch.inference_mode():
            self._record(model, arena, buckets, recorder)

    def _record(
        self, model: LoadedModel, arena: KvArena, buckets: SequenceOf[Bucket], recorder: Recorder
    ) -> None:
        # The largest first: the smaller ones then fit into the memory that it took.
        for bucket in sorted(buckets, reverse=True):
            try:
                step = RecordedStep(model, arena, bucket, recorder)
                difference = difference_from_plain(step, model, arena)
            except Exception as error:  # noqa: BLE001 - whatever cannot be recorded runs plainly
                _give_up(bucket, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                break
            if not difference <= TOLERANCES[model.dtype]:
                _give_up(bucket, f"its logits differ by {difference:.2g} of the largest")
                break
            self._steps.insert(0, step)

    def __len__(self) -> int:
        return len(self._steps)

    def fitting(self, segments: SequenceOf[Segment]) -> RecordedStep | None:
        """The smallest step that holds the segments; None when they are to be run plainly."""
        width = max(segment.token_count for segment in segments)
        length = max(segment.end for segment in segments)
        return next((step for step in self._steps if step.bucket.holds(len(segments), width, length)), None)


def _give_up(bucket: Bucket, reason: str) -> None:
    logger.warning(
        "a step could not be recorded; it and all smaller ones run eagerly",
        extra={"sequences": bucket.sequences, "width": bucket.width, "keys": bucket.length, "reason": reason},
    )


def difference_from_plain(step: RecordedStep, model: LoadedModel, arena: KvArena) -> float:
    """By how much of the largest logit the recorded step differs from the plain one; the arena must be empty."""
    with trial(step.bucket, arena, model.info.vocabulary_size) as segments:
        layout = StepLayout(segments, arena, model.layers, model.dtype, model.device)
        packed = torch.tensor((layout.token_ids(), layout.positions()), device=model.device)
        module = model.module
        plain = module(
            input_ids=packed[:1], position_ids=packed[1:], use_cache=False, **{STEP_ARGUMENT: layout}
        ).logits[0]
        recorded = step.run(layout.segments, range(layout.token_count))
        return float((recorded.float() - plain.float()).abs().max() / plain.float().abs().max())
