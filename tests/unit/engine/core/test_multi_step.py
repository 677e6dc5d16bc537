"""A proposer that runs several steps at once serves the jobs that it takes; the rest of the batch gets single steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.backends.cuda_graphs.capture import without_capture
from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
from tandem.engine.core.finite import non_finite
from tandem.engine.core.jobs import Failed, Job
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.settings import EngineSettings
from tandem.errors import NonFiniteLogitsError, TandemError
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.core.engines import _PROMPT
from tests.unit.engine.greedy import Generation, GreedyHead, plain_greedy

TAKEN_TOKENS = 2
"""Generations of so many tokens are taken, and answered with a text that no model writes."""
ANSWER = [1, 1]


class Proposer:
    """Finishes short generations."""

    tokens_ahead = 1

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.result: list[int] | Failed = ANSWER
        self.error: Exception | None = None

    def takes(self, segment: Segment, job: Job[Generation]) -> bool:
        return job.row_count == 1 and job.payload.token_count == TAKEN_TOKENS

    def run(
        self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[Generation]]
    ) -> list[list[int] | Failed]:
        assert [segment.sequence for segment in segments] == [job.sequence for job in jobs]
        self.batches.append(len(jobs))
        if self.error is not None:
            raise self.error
        for segment in segments:
            segment.sequence.append(1)
            segment.sequence.advance(segment.token_count + 1)
        return [self.result for _ in jobs]


class Mixed:
    """An engine with such a proposer, and records of its steps."""

    def __init__(self, engine: Engine[Any, Any], proposer: Proposer, records: list[StepRecord]) -> None:
        self.engine = engine
        self.proposer = proposer
        self.records = records

    async def generate(self, token_counts: SequenceOf[int]) -> list[Any]:
        """Results and errors of generations that begin together, each after the same prompt."""
        jobs = [
            Job(await self.engine.open(60), Delta(0, _PROMPT), 1, Generation(count)) for count in token_counts
        ]
        results = await asyncio.gather(*map(self.engine.run, jobs), return_exceptions=True)
        self.jobs = jobs
        for job in jobs:
            self.engine.release(job.sequence)
        return results


@asynccontextmanager
async def mixed(tiny: TinyModel, head: Any = None) -> AsyncIterator[Mixed]:
    proposer, records = Proposer(), list[StepRecord]()
    engine: Engine[Any, Any] = Engine(
        tiny.loaded,
        head or GreedyHead(),
        EngineSettings(max_length=64, max_sequences=8, prefix_reuse=False),
        records.append,
        backends=replace(tiny.backends, capture=without_capture),
        make_proposer=lambda _: proposer,
    )
    engine.start()
    try:
        yield Mixed(engine, proposer, records)
    finally:
        await engine.close()


async def test_one_job_that_is_not_taken_leaves_the_others_together(llama: TinyModel) -> None:
    async with mixed(llama) as engine:
        results = await engine.generate([2, 5, 2, 2])
    text = plain_greedy(llama.reference, _PROMPT, 5)
    assert results == [ANSWER, text, ANSWER, ANSWER]
    assert engine.proposer.batches == [3]
    first, *others = engine.records
    assert (first.sequence_count, first.token_count, first.row_count) == (3, 3 * len(_PROMPT), 3)
    assert [(record.sequence_count, record.token_count) for record in others] == [
        (1, len(_PROMPT)),
        *[(1, 1)] * 4,
    ]


async def test_each_part_has_its_own_cost(llama: TinyModel) -> None:
    async with mixed(llama) as engine:
        await engine.generate([2, 1, 2])
    costs = [job.cost for job in engine.jobs]
    assert all(cost is not None for cost in costs)
    assert [(cost.sequences, cost.tokens) for cost in costs if cost is not None] == [
        (2, 2 * len(_PROMPT)), (1, len(_PROMPT)), (2, 2 * len(_PROMPT)),
    ]  # fmt: skip
    assert len(engine.records) == 2
    for record, index in zip(engine.records, (0, 1), strict=True):
        cost = costs[index]
        assert cost is not None
        assert cost.seconds >= record.seconds >= record.model_seconds > 0.0


async def test_a_proposer_that_fails_leaves_the_others_alone(llama: TinyModel) -> None:
    async with mixed(llama) as engine:
        engine.proposer.error = RuntimeError("no memory")
        short, long, other = await engine.generate([2, 3, 2])
        assert isinstance(short, TandemError)
        assert isinstance(other, TandemError)
        assert long == plain_greedy(llama.reference, _PROMPT, 3)
        engine.proposer.error = None
        assert await engine.generate([2]) == [ANSWER]


async def test_a_head_that_fails_leaves_finished_jobs_alone(llama: TinyModel) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no memory")

    async with mixed(llama, broken) as engine:
        short, long = await engine.generate([2, 3])
    assert short == ANSWER
    assert isinstance(long, TandemError)
    assert [record.sequence_count for record in engine.records] == [1], "a step that failed has no record"


async def test_a_wrong_result_is_its_own_jobs_alone(llama: TinyModel) -> None:
    async with mixed(llama) as engine:
        engine.proposer.result = non_finite(len(_PROMPT))
        short, long = await engine.generate([2, 3])
    assert isinstance(short, NonFiniteLogitsError)
    assert long == plain_greedy(llama.reference, _PROMPT, 3)


@pytest.mark.parametrize("head_fails", [False, True])
async def test_the_engine_gives_up_after_failures_in_a_row_only(llama: TinyModel, head_fails: bool) -> None:
    """A device that has failed fails every part of a step."""

    def broken(*_: object) -> Any:
        raise RuntimeError("device-side assert")

    async with mixed(llama, broken if head_fails else None) as engine:
        engine.proposer.error = RuntimeError("device-side assert")
        for _ in range(8):
            if engine.engine.is_running:
                await engine.generate([2, 1])
        await asyncio.sleep(0.05)
        assert engine.engine.is_running != head_fails
