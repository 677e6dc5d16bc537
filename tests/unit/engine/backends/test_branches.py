"""Branches attend to their trunk up to where they leave it and to their own tokens, never to each other's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.branches import BranchStep
from tandem.engine.core.events import StepRecord
from tandem.types import Delta
from tests.unit.engine.backends.branch_jobs import LEAVES_AFTER, TOKENS, Branches, poison, trust_kernels
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import RowsHead, plain_logits, rows, running

_TRUNK = [5, 17, 80, 3, 44, 9, 21, 60]


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
async def test_each_branch_equals_a_sequence_of_its_own(
    tiny_model: Callable[[str], TinyModel], family: str, with_kernels: bool
) -> None:
    model = tiny_model(family)
    async with running(model.with_plans if with_kernels else model.loaded, RowsHead()) as engine:
        if with_kernels:
            await engine.warm_up()
            trust_kernels(engine)
        poison(engine)
        sequence = await engine.open(64, 64)
        await rows(engine, sequence, Delta(0, _TRUNK[:5]), 1)
        job = Branches(sequence, Delta(5, _TRUNK[5:]))
        engine.put_back(job)
        async with asyncio.timeout(20):
            await job.done.wait()
        assert job.error is None
        assert job.trunk is not None
        assert torch.allclose(job.trunk, plain_logits(model.reference, _TRUNK)[-3:], atol=1e-3)
        for depth, logits in enumerate(job.logits):
            for branch, row in enumerate(logits):
                path = _TRUNK[: LEAVES_AFTER[branch]] + [TOKENS[d][branch] for d in range(depth + 1)]
                assert torch.allclose(row, plain_logits(model.reference, path)[-1], atol=1e-3), (
                    depth,
                    branch,
                )
        # The sequence grows over what the branches left behind it.
        more = await rows(engine, sequence, Delta(len(_TRUNK), [7, 8]), 2)
        assert torch.allclose(more, plain_logits(model.reference, [*_TRUNK, 7, 8])[-2:], atol=1e-3)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
async def test_sequences_share_steps_and_each_branch_is_what_it_would_be_alone(
    tiny_model: Callable[[str], TinyModel], family: str, with_kernels: bool
) -> None:
    model = tiny_model(family)
    records: list[StepRecord] = []
    trunks = [[*_TRUNK[1:4], other, *_TRUNK] for other in (1, 2, 3)]
    trunks[1] += [70, 71]
    async with running(
        model.with_plans if with_kernels else model.loaded, RowsHead(), on_step=records.append
    ) as engine:
        if with_kernels:
            await engine.warm_up()
            trust_kernels(engine)
        poison(engine)
        sequences = [await engine.open(64, 64) for _ in trunks]
        for sequence, trunk in zip(sequences, trunks, strict=True):
            await rows(engine, sequence, Delta(0, trunk[:5]), 1)
        records.clear()
        jobs = [
            Branches(sequence, Delta(5, trunk[5:]), enough=3 - (number == 2))
            for number, (sequence, trunk) in enumerate(zip(sequences, trunks, strict=True))
        ]
        with engine._worker._wakeup:  # submitted together, so that one step can hold all
            for job in jobs:
                engine.put_back(job)
        async with asyncio.timeout(20):
            await asyncio.gather(*(job.done.wait() for job in jobs))
    for job, trunk in zip(jobs, trunks, strict=True):
        assert job.error is None
        assert job.trunk is not None
        assert torch.allclose(job.trunk, plain_logits(model.reference, trunk)[-3:], atol=1e-3)
        assert len(job.logits) == job.enough
        for depth, logits in enumerate(job.logits):
            for branch, row in enumerate(logits):
                path = trunk[: LEAVES_AFTER[branch]] + [TOKENS[d][branch] for d in range(depth + 1)]
                assert torch.allclose(row, plain_logits(model.reference, path)[-1], atol=1e-3), (
                    depth,
                    branch,
                )
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
        with engine._worker._wakeup:
            for job in jobs:
                engine.put_back(job)
        async with asyncio.timeout(20):
            await asyncio.gather(*(job.done.wait() for job in jobs))
    assert [job.error is None for job in jobs] == [False, True]
    assert len(jobs[1].logits) == jobs[1].enough


async def test_a_job_of_the_sequence_ends_its_branches_and_keeps_its_trunk(llama: TinyModel) -> None:
    async with running(llama.loaded, RowsHead()) as engine:
        sequence = await engine.open(64, 64)
        await rows(engine, sequence, Delta(0, _TRUNK[:5]), 1)
        job = Branches(sequence, Delta(5, _TRUNK[5:]))
        engine.put_back(job)
        # At once: the background has hardly begun. The delta must count all the same.
        found = await rows(engine, sequence, Delta(8, [7]), 1)
        assert torch.allclose(found, plain_logits(llama.reference, [*_TRUNK, 7])[-1:], atol=1e-3)
        assert len(job.logits) < job.enough
        assert engine._worker._background.is_empty


async def test_a_trunk_that_does_not_fit_is_an_error_of_that_job(llama: TinyModel) -> None:
    async with running(llama.loaded, RowsHead()) as engine:
        sequence = await engine.open(16)
        await rows(engine, sequence, Delta(0, _TRUNK), 1)
        job = Branches(sequence, Delta(12, [1]))
        engine.put_back(job)
        async with asyncio.timeout(20):
            await job.done.wait()
        assert "starts at token 12" in str(job.error)
        assert len(await rows(engine, sequence, Delta(8, [7]), 1)) == 1


async def test_a_released_sequence_is_not_drafted_for(llama: TinyModel) -> None:
    async with running(llama.loaded, RowsHead()) as engine:
        sequence = await engine.open(64)
        await rows(engine, sequence, Delta(0, _TRUNK), 1)
        engine.put_back(Branches(sequence, Delta(8, [])))
        engine.release(sequence)
        other = await engine.open(64)
        await rows(engine, other, Delta(0, _TRUNK), 1)
        assert engine._worker._background.is_empty


async def test_jobs_go_before_branches(llama: TinyModel) -> None:
    """Jobs that wait run first; at most one step of the background had begun when they came."""
    order: list[str] = []

    def on_step(record: StepRecord) -> None:
        order.append("job" if record.token_count == 1 and record.row_count == 1 else "branches")

    async with running(llama.loaded, RowsHead(), on_step=on_step) as engine:
        drafted, waited_for = await engine.open(64, 64), await engine.open(64)
        await rows(engine, drafted, Delta(0, _TRUNK), 1)
        await rows(engine, waited_for, Delta(0, _TRUNK), 1)
        order.clear()
        background = Branches(drafted, Delta(8, []))
        engine.put_back(background)
        with engine._worker._wakeup:  # submitted together, so that one step can hold all
            jobs = [rows(engine, waited_for, Delta(8 + step, [7]), 1) for step in range(6)]
            tasks = [asyncio.create_task(job) for job in jobs]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(20):
            await background.done.wait()
    runs = "".join("j" if name == "job" else "b" for name in order).split("j")
    assert sum(map(len, runs[:-1])) <= 1
