"""An engine whose steps another engine's thread takes: a drafting head's, between two steps of its target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Job, PayloadT, ResultT
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import ServiceUnavailableError


class InlineEngine(Engine[PayloadT, ResultT]):
    """Warms up on a thread of its own, which then ends. From then on whoever calls `run_here` takes its steps.

    Its places are those of the other engine's sequences, so nobody waits for one here.
    """

    _is_inline = False

    async def warm_up(self) -> None:
        await super().warm_up()
        while self._places.held:  # noqa: ASYNC110 - once, at the start
            await asyncio.sleep(0.001)  # the thread still has to free what it warmed up with
        with self._wakeup:
            self._is_closing = True
            self._is_stopping = True
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join)
        self._is_inline = True

    def place(self, max_length: int) -> Sequence:
        """A new, empty sequence."""
        return Sequence(self._shape.tables(max_length), max_length, self.model.info.vocabulary_size)

    def forget(self, sequence: Sequence) -> None:
        """Give a sequence's memory back."""
        sequence.is_released = True
        self._cache.release(sequence)

    def run_here(self, jobs: SequenceOf[Job[PayloadT]]) -> list[ResultT | BaseException]:
        """Run jobs of different sequences to their ends, on the calling thread, and return what became of each."""
        try:
            for job in jobs:
                self._start_job(job)
            while self._running and self._step():
                pass
        finally:
            # After an error too: a job that is left must not run in the next call, when its pages may be another's.
            for job in list(self._running.values()):
                self._settle(job, ServiceUnavailableError("There are no pages for the sequence."))
            results = {id(job): result for job, result in self._ended}
            self._ended = []
        return [results[id(job)] for job in jobs]  # type: ignore[misc]

    def _deliver(self) -> None:
        """Nobody waits for results but `run_here`."""
        if not self._is_inline:
            super()._deliver()
