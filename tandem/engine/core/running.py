"""Jobs in progress and jobs that have ended, on the engine's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Generic

from tandem.engine.core.jobs import Failed, Job, PayloadT
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import TandemError
from tandem.types import Delta


class RunningJobs(Generic[PayloadT]):
    """At most one job for each sequence, in the order in which they started."""

    def __init__(self, distrust: Callable[[Sequence], None]) -> None:
        """
        Args:
            distrust: told of each sequence whose keys and values are wrong.
        """
        self._distrust = distrust
        self.by_sequence: dict[Sequence, Job[PayloadT]] = {}
        self._ended: list[tuple[Job[PayloadT], object]] = []

    def add(self, job: Job[PayloadT]) -> None:
        """Starts a job whose sequence has none."""
        self.by_sequence[job.sequence] = job
        job.sequence.idle_since = math.inf

    def settle(self, job: Job[PayloadT], result: object) -> None:
        """Ends a job, whether it ran or not, with a result or an exception."""
        if self.by_sequence.get(job.sequence) is job:
            del self.by_sequence[job.sequence]
            job.sequence.idle_since = time.monotonic()
            job.sequence.is_new = False
        self._ended.append((job, result))

    def settle_untrusted(self, job: Job[PayloadT], failed: Failed) -> None:
        """Ends a job with wrong numbers; no other sequence reuses its keys and values."""
        self._distrust(job.sequence)
        job.sequence.apply(Delta(0, ()))
        self.settle(job, failed.error)

    def fail(self, jobs: SequenceOf[Job[PayloadT]], error: TandemError) -> None:
        """Ends those of the jobs that still run."""
        for job in jobs:
            if self.by_sequence.get(job.sequence) is job:
                self.settle(job, error)

    def abandoned(self) -> list[Job[PayloadT]]:
        """Jobs that were cancelled or whose sequence was released."""
        return [job for job in self.by_sequence.values() if job.is_abandoned]

    @property
    def ended_sequences(self) -> list[Sequence]:
        """Sequences of the jobs that `take_ended` will return."""
        return [job.sequence for job, _ in self._ended]

    def take_ended(self) -> list[tuple[Job[PayloadT], object]]:
        """Jobs that have ended since the last call, each with its result or exception."""
        ended, self._ended = self._ended, []
        return ended
