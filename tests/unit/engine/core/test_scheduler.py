"""A long prompt never delays the others by more than one chunk."""

from __future__ import annotations

import pytest

from tandem.engine.core.jobs import Job
from tandem.engine.core.scheduler import next_segments
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
