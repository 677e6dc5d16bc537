"""Reads what a drafting head on another device wants of the target's steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from tandem.engine.core.jobs import Job
from tandem.engine.hidden_states import HiddenStateTap
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.heads.eagle import Eagle3Head
from tandem.engine.models.heads.interface import StateReader
from tandem.model.types import HiddenStates, RowKind, TokenRow, Verification, common_length


class Projection(StateReader):
    """The first projection of an EAGLE-3 head, which is all of it that the target runs."""

    def __init__(self, head: Eagle3Head) -> None:
        self.layer_ids = head.layer_ids
        self.state_size = head.state_size
        self.readers = head.readers
        self._combine = head.combine

    def combine(self, hidden_states: SequenceOf[Tensor]) -> Tensor:
        return self._combine(hidden_states)


class FeatureSender:
    """Gives each position's states once, with the verification that commits it.

    Behind token rows the outcome is known here, and rejected positions are left out. Other rows are decided by the
    coordinator: there all positions of a proposal are given.
    """

    def __init__(self, tap: HiddenStateTap, head: str) -> None:
        """`head` is the fingerprint of the head whose projection the tap applies."""
        self._tap = tap
        self._head = head
        self._given: dict[Sequence, int] = {}
        """Positions before this one have been given."""

    def release(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)

    def read(
        self, jobs: SequenceOf[Job[Any]], answers: SequenceOf[Verification | None]
    ) -> list[HiddenStates | None]:
        """See `FeatureReader`."""
        found: list[HiddenStates | None] = [None] * len(jobs)
        wanted: dict[int, tuple[Sequence, int, int]] = {}
        for index, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
            if answer is not None and job.payload.options.features is not None:
                start, end = self._span(job, answer)
                if start < end:
                    wanted[index] = job.sequence, start, end
        if not wanted:
            return found
        for (index, (sequence, start, end)), states in zip(
            wanted.items(), self._tap.read([*wanted.values()]), strict=True
        ):
            if states is None:
                continue  # another sequence has the pages: the head goes without
            self._given[sequence] = end
            found[index] = self._pack(start, states)
        return found

    def _span(self, job: Job[Any], answer: Verification) -> tuple[int, int]:
        options = job.payload.options
        start = self._given.get(job.sequence)
        if start is None:
            window = options.features.prompt_window
            start = 0 if window is None else max(options.prompt_length - 1 - window, 0)
        start = min(start, job.delta.base_length) if job.sequence in self._given else start
        step = job.payload.step
        proposed = step.delta.token_ids[len(step.delta.token_ids) - step.row_count + 1 :]
        kept = len(proposed)
        if step.row_kind is RowKind.TOKEN:
            kept = common_length(proposed, [row.token_id for row in answer.rows if isinstance(row, TokenRow)])
        return start, answer.base_length + kept

    def _pack(self, start: int, states: Tensor) -> HiddenStates:
        count, width = states.shape
        data = states.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        dtype = str(states.dtype).removeprefix("torch.")
        return HiddenStates(self._head, start, dtype, (count, width), data)
