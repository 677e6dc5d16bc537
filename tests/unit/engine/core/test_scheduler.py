"""A long prompt never delays the others by more than one chunk."""

from __future__ import annotations

import heapq
import itertools
import threading
from typing import Any

import pytest

from tandem.engine.core.jobs import Job
from tandem.engine.core.scheduler import RejoinWindow, next_segments
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta

_CHUNK = 100


def _job(pending: int, row_count: int = 1, computed: int = 0) -> Job[None]:
    """A job of a sequence that has had an answer, if it has computed anything."""
    sequence = Sequence(PageTable(64, 1024), 1024, vocabulary_size=2)
    sequence.is_new = not computed
    sequence.apply(Delta(0, [1] * (computed + pending)))
    sequence.advance(computed)
    return Job(sequence, Delta(0, ()), row_count, None)


def _counts(*jobs: Job[None]) -> list[int]:
    chosen = {segment.sequence: segment.token_count for segment in next_segments(jobs, _CHUNK)}
    return [chosen.get(job.sequence, 0) for job in jobs]


def test_short_work_runs_beside_a_long_prompt() -> None:
    assert _counts(_job(500), _job(1, computed=40), _job(6, 6, computed=9)) == [100, 1, 6]


def test_rounds_always_run_and_short_prompts_share_a_chunk() -> None:
    """Forty prompts of which others have computed all but the ends would make a step of a thousand tokens."""
    rounds = [_job(5, 5, computed=40) for _ in range(30)]
    prompts = [_job(30) for _ in range(40)]
    assert _counts(*prompts, *rounds) == [30, 30, 30, *[0] * 37, *[5] * 30]


def test_a_short_prompt_goes_before_a_long_one() -> None:
    assert _counts(_job(500), _job(10), _job(20)) == [70, 10, 20]


def test_long_prompts_share_one_chunk_oldest_first() -> None:
    assert _counts(_job(60), _job(60), _job(60)) == [60, 40, 0]


@pytest.mark.parametrize(("pending", "expected"), [(100, 100), (101, 100), (103, 99), (140, 100)])
def test_rows_are_not_split_over_steps(pending: int, expected: int) -> None:
    assert _counts(_job(pending, row_count=4 if pending == 103 else 1)) == [expected]


def test_rows_of_everything_are_run_at_once() -> None:
    assert _counts(_job(150, row_count=150)) == [150]


def test_every_job_gets_through() -> None:
    jobs = [_job(730, 3), _job(99, 99), _job(33, 0), _job(150, 150)]
    for _ in range(40):
        segments = next_segments([job for job in jobs if job.sequence.pending_count], _CHUNK)
        for segment in segments:
            segment.sequence.advance(segment.token_count)
    assert not any(job.sequence.pending_count for job in jobs)


class _Clients(threading.Condition):
    """Sequences that each return so many milliseconds after an answer, on a clock that moves when somebody waits."""

    def __init__(self, *delays: float) -> None:
        super().__init__()
        self.now = 0.0
        self.window = RejoinWindow(self, lambda: self.now)
        self.delays = {_job(1, computed=1).sequence: delay for delay in delays}
        self.ready: set[Sequence] = set()
        self._order = itertools.count()
        self._returns: list[Any] = []

    def wait(self, timeout: float | None = None) -> bool:
        until = self.now + (1e9 if timeout is None else timeout)
        if not self._returns or self._returns[0][0] > until:
            self.now = until
            return False
        self.now, _, sequence = heapq.heappop(self._returns)
        self.ready.add(sequence)
        self.window.came_back(sequence)
        return True

    def step(self, milliseconds: float) -> set[Sequence]:
        """Run a step of all that are ready; returns them."""
        while not self.ready:
            self.wait()
        self.window.wait(has_running=False, is_stopping=lambda: False)
        batch, self.ready = self.ready, set()
        began, ended = self.now, self.now + milliseconds
        while self.now < ended:
            self.wait(ended - self.now)
        for sequence in batch:
            due = self.now + self.delays[sequence]
            heapq.heappush(self._returns, (due, next(self._order), sequence))
        self.window.expect(batch, began, self.now)
        return batch


def test_two_groups_become_one_whatever_a_slow_client_does() -> None:
    """Of nine sequences one is slow, and two groups of the others alternate to begin with."""
    clients = _Clients(*[1.0 + 0.2 * index for index in range(8)], 40.0)
    *prompt, slow = clients.delays
    clients.ready = {slow, *prompt[:4]}
    clients.step(12.0)
    clients.ready |= set(prompt[4:])
    with clients:
        batches = [clients.step(12.0) for _ in range(60)]
    assert all(batch >= set(prompt) for batch in batches[3:])
    # Nobody waits for the slow one: the others return in 2.4 ms.
    assert clients.now < 62 * (12.0 + 2.4) + 2 * 0.3 * 12.0


def test_a_client_is_waited_for_again_once_it_returns_in_time() -> None:
    clients = _Clients(1.0, 20.0)
    fast, slow = clients.delays
    clients.ready = {fast, slow}
    with clients:
        apart = [clients.step(10.0) for _ in range(12)]
        clients.delays[slow] = 2.0
        together = [clients.step(10.0) for _ in range(12)]
    assert {fast} in apart[1:]
    assert together[4:] == [{fast, slow}] * 8
