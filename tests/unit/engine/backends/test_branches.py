"""Branches attend to their trunk up to where they leave it and to their own tokens, never to each other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.core.background import HeadStart
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import StepRecord
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.steps import BranchStep
from tandem.errors import TandemError
from tandem.model.types import Delta
from tests.service.clients import until
from tests.unit.engine.conftest import MakeModel, TinyModel
from tests.unit.engine.greedy import RowsHead, plain_logits, rows, running

_TRUNK = [5, 17, 80, 3, 44, 9, 21, 60]
FAMILIES = pytest.mark.parametrize(
    ("family", "with_kernels"), [("llama", True), ("mistral", False), ("gemma2", True), ("gpt_oss", False)]
)


@FAMILIES
async def test_sequences_share_steps_and_each_branch_is_what_it_would_be_alone(
    tiny_model: MakeModel, family: str, with_kernels: bool
) -> None:
    model = tiny_model(family)
    records: list[StepRecord] = []
    trunks = [[*_TRUNK[1:4], other, *_TRUNK] for other in (1, 2, 3)]
    trunks[1] += [70, 71]
    async with poisoned(model, with_kernels=with_kernels, on_step=records.append) as engine:
        sequences = [await engine.open(64, 64) for _ in trunks]
        for sequence, trunk in zip(sequences, trunks, strict=True):
            await rows(engine, sequence, Delta(0, trunk[:5]), 1)
        records.clear()
        jobs = [
            Branches(sequence, Delta(5, trunk[5:]), enough=3 - (number == 2))
            for number, (sequence, trunk) in enumerate(zip(sequences, trunks, strict=True))
        ]
        await run_together(engine, *jobs)
    for job, trunk in zip(jobs, trunks, strict=True):
        job.check_trunk(model.reference, trunk)
        assert len(job.logits) == job.enough
        job.check_branches(model.reference, trunk)
    assert [record.sequence_count for record in records[:4]] == [3, 3, 3, 2], "trunks, then three depths"
    assert [record.token_count for record in records[1:4]] == [15, 12, 8]


async def test_a_failing_job_does_not_affect_others_in_its_step(llama: TinyModel) -> None:
    class Failing(Branches):
        def advance(self, logits: Tensor) -> BranchStep | None:
            raise RuntimeError("injected")

    async with running(llama.loaded, RowsHead()) as engine:
        sequences = [await engine.open(64, 64) for _ in range(2)]
        for sequence in sequences:
            await rows(engine, sequence, Delta(0, _TRUNK[:5]), 1)
        jobs = [
            kind(sequence, Delta(5, _TRUNK[5:]))
            for kind, sequence in zip((Failing, Branches), sequences, strict=True)
        ]
        await run_together(engine, *jobs)
    assert [job.error is None for job in jobs] == [False, True]
    assert len(jobs[1].logits) == jobs[1].enough


async def test_jobs_go_before_branches(llama: TinyModel) -> None:
    """Jobs that wait run first; at most one step of the background had begun when they came."""
    order: list[str] = []

    def on_step(record: StepRecord) -> None:
        order.append("job" if record.token_count == 1 and record.row_count == 1 else "branches")

    async with running(llama.loaded, RowsHead(), on_step=on_step) as engine:
        drafted = await engine.open(64, 64)
        waited_for = await engine.open(64)
        await rows(engine, drafted, Delta(0, _TRUNK), 1)
        await rows(engine, waited_for, Delta(0, _TRUNK), 1)
        order.clear()
        background = Branches(drafted, Delta(8, []))
        engine.put_back(background)
        with engine._wakeup:  # submitted together, so that one step can hold all
            jobs = [rows(engine, waited_for, Delta(8 + step, [7]), 1) for step in range(6)]
            tasks = [asyncio.create_task(job) for job in jobs]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(20):
            await background.done.wait()
    runs = "".join("j" if name == "job" else "b" for name in order).split("j")
    assert sum(map(len, runs[:-1])) <= 1


_PATH = [14, 24, 34]
"""The tokens of the first job's fourth branch, which leaves the trunk at its end."""


@dataclass
class Drafted:
    """A sequence whose branches have been run."""

    engine: Engine[object, object]
    sequence: Sequence
    model: TinyModel
    records: list[StepRecord]

    async def run(self, job: Branches) -> Branches:
        self.records.clear()
        await run_together(self.engine, job)
        assert job.error is None
        await until(lambda: job.steps == job.enough, 20.0)  # the last step is recorded
        return job


@asynccontextmanager
async def drafted(model: TinyModel, *, with_kernels: bool = False) -> AsyncIterator[Drafted]:
    records: list[StepRecord] = []
    async with poisoned(model, with_kernels=with_kernels, on_step=records.append) as engine:
        sequence = await engine.open(64, 64)
        await rows(engine, sequence, Delta(0, _TRUNK[:5]), 1)
        own = Drafted(engine, sequence, model, records)
        await own.run(Branches(sequence, Delta(5, _TRUNK[5:])))
        yield own


@FAMILIES
async def test_a_branch_becomes_the_trunk_and_what_it_has_more_leads_the_next(
    tiny_model: MakeModel, family: str, with_kernels: bool
) -> None:
    async with drafted(tiny_model(family), with_kernels=with_kernels) as own:
        trunk = [*_TRUNK, *_PATH[:2]]
        second = await own.run(
            Branches(
                own.sequence, Delta(8, _PATH[:2]), 2, leaves_after=(11, 9, 10, 8, 10), max_lead=4, enough=2
            )
        )
        second.check_trunk(own.model.reference, trunk)
        assert second.lead is not None
        assert second.lead.token_ids == _PATH[2:]
        second.check_branches(own.model.reference, [*trunk, *_PATH[2:]])
        assert [record.token_count for record in own.records] == [5, 4], "no step read the trunk"
        # Once more: the first branch, whose path begins with the lead, leads again.
        path = [*_PATH[2:], TOKENS[0][0]]
        third = await own.run(
            Branches(own.sequence, Delta(10, path), 2, leaves_after=(13, 9, 10, 11, 12), max_lead=1)
        )
        third.check_trunk(own.model.reference, [*trunk, *path])
        assert third.lead is not None
        assert third.lead.token_ids == [TOKENS[1][0]]
        third.check_branches(own.model.reference, [*trunk, *path, TOKENS[1][0]])
        assert own.records[0].token_count == 5
        # A job of the sequence counts from its own tokens, whatever leads.
        more = await rows(own.engine, own.sequence, Delta(12, [7, 8]), 2)
        expected = plain_logits(own.model.reference, [*trunk, *path, 7, 8])
        assert torch.allclose(more, expected[-2:], atol=1e-3)


@pytest.mark.parametrize("row_count", [1, 2, 3, 4])
async def test_a_branch_that_begins_early_gives_the_wanted_rows_only(
    llama: TinyModel, row_count: int
) -> None:
    """A hit came on top of a hit whose trunk nobody had read yet. Another job's trunk shares the step."""
    async with drafted(llama) as own:
        other = await own.engine.open(64, 64)
        await rows(own.engine, other, Delta(0, _TRUNK[:5]), 1)
        beside = Branches(other, Delta(5, _TRUNK[5:]), 3)
        job = Branches(own.sequence, Delta(8, [*_PATH, 7]), row_count, leaves_after=(8, 9, 10, 11, 11))
        await run_together(own.engine, job, beside)
        job.check_trunk(own.model.reference, [*_TRUNK, *_PATH, 7])
        beside.check_trunk(own.model.reference, _TRUNK)


async def test_branches_whose_pages_went_to_others_are_computed_again(llama: TinyModel) -> None:
    async with drafted(llama) as own:
        own.engine._pages._free_spare_pages()
        poison_behind(own)
        second = await own.run(
            Branches(own.sequence, Delta(8, _PATH), 3, leaves_after=(8, 9, 10, 11, 11), max_lead=4)
        )
        second.check_trunk(own.model.reference, [*_TRUNK, *_PATH])


def poison_behind(own: Drafted) -> None:
    for layer in own.engine._cache._arena.layers:  # type: ignore[attr-defined]
        for table in own.sequence.tables:
            layer.keys[table[0], len(_TRUNK) :] = float("nan")
            layer.values[table[0], len(_TRUNK) :] = float("nan")


async def test_a_branch_that_cannot_be_taken_over_is_an_error_of_that_job(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    async with drafted(llama) as own:
        job = Branches(own.sequence, Delta(8, _PATH[:2]), 2, max_lead=4)
        with monkeypatch.context() as patched:
            patched.setattr(own.engine._cache, "take_over", out_of_memory)
            await run_together(own.engine, job)
        assert str(job.error) == "the model's step failed"
        more = await rows(own.engine, own.sequence, Delta(8, [7, 8]), 2)
        assert torch.allclose(more, plain_logits(llama.reference, [*_TRUNK, 7, 8])[-2:], atol=1e-3)


LEAVES_AFTER = [5, 6, 6, 8, 7]
TOKENS = [[11, 12, 13, 14, 15], [21, 22, 23, 24], [31, 32, 33, 34]]
"""By depth; the last branch is given up after the first."""


@dataclass
class Branches:
    """A background job that runs given tokens."""

    sequence: Sequence
    delta: Delta
    row_count: int = 3
    done: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    trunk: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    error: TandemError | None = None
    steps: int = 0
    enough: int = 3
    leaves_after: SequenceOf[int] = tuple(LEAVES_AFTER)
    max_lead: int = 0
    lead: HeadStart | None = None
    draws: None = None

    def take(self, drawn: SequenceOf[Any]) -> None:
        raise AssertionError("nothing is drawn in a row")

    def begin(self, logits: Tensor, room: int, lead: HeadStart | None) -> BranchStep | None:
        self.lead = lead
        self.trunk = logits.clone()
        assert room >= len(self.leaves_after) * len(TOKENS)
        return self._step()

    def advance(self, logits: Tensor) -> BranchStep | None:
        self.logits.append(logits.clone())
        if len(self.logits) == self.enough:
            self.loop.call_soon_threadsafe(self.done.set)
            return None
        return self._step()

    def _step(self) -> BranchStep:
        depth = len(self.logits)
        return BranchStep(self.sequence, TOKENS[depth], self.leaves_after, depth, len(TOKENS))

    def count_step(self, record: StepRecord) -> None:
        self.steps += 1

    def fail(self, error: TandemError) -> None:
        self.error = error
        self.loop.call_soon_threadsafe(self.done.set)

    def check_trunk(self, reference: Any, tokens: SequenceOf[int]) -> None:
        """Its rows are those of transformers."""
        assert self.error is None
        assert self.trunk is not None
        expected = plain_logits(reference, tokens)[-self.row_count :]
        assert torch.allclose(self.trunk, expected, atol=1e-3)

    def check_branches(self, reference: Any, trunk: SequenceOf[int]) -> None:
        """Each branch is what its tokens would be alone, behind as much of the trunk as it has."""
        assert self.error is None
        for depth, logits in enumerate(self.logits):
            for branch, row in enumerate(logits):
                path = [*trunk[: self.leaves_after[branch]], *(TOKENS[d][branch] for d in range(depth + 1))]
                expected = plain_logits(reference, path)[-1]
                assert torch.allclose(row.cpu(), expected, atol=1e-3), (depth, branch)


async def run_together(engine: Engine[object, object], *jobs: Branches) -> None:
    """Submit the jobs at once, so that one step can hold all, and wait for their ends."""
    with engine._wakeup:
        for job in jobs:
            engine.put_back(job)
    async with asyncio.timeout(60):
        await asyncio.gather(*(job.done.wait() for job in jobs))


@asynccontextmanager
async def poisoned(
    model: TinyModel, *, with_kernels: bool, **options: Any
) -> AsyncIterator[Engine[Any, Any]]:
    """An engine whose unwritten memory is all NaN; with kernels it replays its steps from plans."""
    runner = model.with_plans if with_kernels else model.loaded
    async with running(runner, RowsHead(), **options) as engine:
        if with_kernels:
            await engine.warm_up()
        for layer in engine._cache._arena.layers:  # type: ignore[attr-defined]
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        yield engine
