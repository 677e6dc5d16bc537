"""A sequence that goes on with a branch takes over its keys, values and logits, and equals one that computed them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from tandem.engine.core.background.kept_branches import MAX_BYTES, KeptBranches
from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.types import Delta
from tests.service.clients import until
from tests.unit.engine.backends.branch_jobs import TOKENS, Branches, poison, trust_kernels
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import RowsHead, plain_logits, rows, running

_TRUNK = [5, 17, 80, 3, 44, 9, 21, 60]
_PATH = [14, 24, 34]
"""What the fourth branch of the first job runs; it leaves the trunk at its end."""


@dataclass
class Drafted:
    """A sequence whose branches have been run."""

    engine: Engine[object, object]
    sequence: CachedSequence
    model: TinyModel
    records: list[StepRecord]

    async def run(self, job: Branches) -> Branches:
        self.records.clear()
        self.engine.put_back(job)
        async with asyncio.timeout(20):
            await job.done.wait()
        assert job.error is None
        await until(lambda: job.steps == job.enough, 20.0)  # the last step is recorded
        return job

    def check_trunk(self, job: Branches, tokens: Sequence[int]) -> None:
        assert job.trunk is not None
        expected = plain_logits(self.model.reference, tokens)[-job.row_count :]
        assert torch.allclose(job.trunk, expected, atol=1e-3)

    def check_branches(self, job: Branches, trunk: Sequence[int]) -> None:
        for depth, logits in enumerate(job.logits):
            for branch, row in enumerate(logits):
                path = [*trunk[: job.leaves_after[branch]], *(TOKENS[d][branch] for d in range(depth + 1))]
                assert torch.allclose(row, plain_logits(self.model.reference, path)[-1], atol=1e-3), (
                    depth,
                    branch,
                )


@asynccontextmanager
async def drafted(model: TinyModel, *, with_kernels: bool = False) -> AsyncIterator[Drafted]:
    records: list[StepRecord] = []
    loaded = model.with_plans if with_kernels else model.loaded
    async with running(loaded, RowsHead(), on_step=records.append) as engine:
        if with_kernels:
            await engine.warm_up()
            trust_kernels(engine)
        poison(engine)
        sequence = await engine.open(64, 64)
        await rows(engine, sequence, Delta(0, _TRUNK[:5]), 1)
        own = Drafted(engine, sequence, model, records)
        await own.run(Branches(sequence, Delta(5, _TRUNK[5:])))
        yield own


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
async def test_a_branch_becomes_the_trunk_and_what_it_has_more_leads_the_next(
    tiny_model: Callable[[str], TinyModel], family: str, with_kernels: bool
) -> None:
    async with drafted(tiny_model(family), with_kernels=with_kernels) as own:
        trunk = [*_TRUNK, *_PATH[:2]]
        second = await own.run(
            Branches(
                own.sequence, Delta(8, _PATH[:2]), 2, leaves_after=(11, 9, 10, 8, 10), max_lead=4, enough=2
            )
        )
        own.check_trunk(second, trunk)
        assert second.lead is not None
        assert second.lead.token_ids == _PATH[2:]
        own.check_branches(second, [*trunk, *_PATH[2:]])
        assert [record.token_count for record in own.records] == [5, 4], "no step read the trunk"
        # Once more: the first branch, whose path begins with the lead, leads again.
        path = [*_PATH[2:], TOKENS[0][0]]
        third = await own.run(
            Branches(own.sequence, Delta(10, path), 2, leaves_after=(13, 9, 10, 11, 12), max_lead=1)
        )
        own.check_trunk(third, [*trunk, *path])
        assert third.lead is not None
        assert third.lead.token_ids == [TOKENS[1][0]]
        own.check_branches(third, [*trunk, *path, TOKENS[1][0]])
        assert own.records[0].token_count == 5
        # A job of the sequence counts from its own tokens, whatever leads.
        more = await rows(own.engine, own.sequence, Delta(12, [7, 8]), 2)
        expected = plain_logits(own.model.reference, [*trunk, *path, 7, 8])
        assert torch.allclose(more, expected[-2:], atol=1e-3)


@pytest.mark.parametrize("with_kernels", [False, True])
async def test_only_what_a_branch_lacks_is_read(llama: TinyModel, with_kernels: bool) -> None:
    async with drafted(llama, with_kernels=with_kernels) as own:
        second = await own.run(
            Branches(own.sequence, Delta(6, [12, 22, 90]), 3, leaves_after=(6, 7, 8, 9, 9), max_lead=4)
        )
        own.check_trunk(second, [*_TRUNK[:6], 12, 22, 90])
        own.check_branches(second, [*_TRUNK[:6], 12, 22, 90])
        assert own.records[0].token_count == 1
        assert second.lead is None


@pytest.mark.parametrize("row_count", [1, 2, 3, 4])
async def test_a_branch_that_begins_before_the_wanted_rows_gives_only_those(
    llama: TinyModel, row_count: int
) -> None:
    """A hit came on top of a hit whose trunk nobody had read yet. Another job's trunk shares the step."""
    async with drafted(llama) as own:
        other = await own.engine.open(64, 64)
        await rows(own.engine, other, Delta(0, _TRUNK[:5]), 1)
        beside = Branches(other, Delta(5, _TRUNK[5:]), 3)
        job = Branches(own.sequence, Delta(8, [*_PATH, 7]), row_count, leaves_after=(8, 9, 10, 11, 11))
        with own.engine._worker._wakeup:  # so that both are taken at once
            own.engine.put_back(job)
            own.engine.put_back(beside)
        async with asyncio.timeout(20):
            await job.done.wait()
            await beside.done.wait()
        own.check_trunk(job, [*_TRUNK, *_PATH, 7])
        own.check_trunk(beside, _TRUNK)


async def test_a_lead_that_did_not_come_true_is_read_by_nobody(llama: TinyModel) -> None:
    async with drafted(llama) as own:
        first = Branches(own.sequence, Delta(8, _PATH[:2]), 2, leaves_after=(10, 9, 10, 8, 10), max_lead=4)
        await own.run(first)
        assert first.lead is not None
        own.check_branches(first, [*_TRUNK, *_PATH[:2]])


async def test_another_job_of_the_sequence_forgets_its_branches(llama: TinyModel) -> None:
    async with drafted(llama) as own:
        await rows(own.engine, own.sequence, Delta(8, [1, 2, 3, 4, 5, 6]), 1)
        second = await own.run(
            Branches(own.sequence, Delta(8, _PATH), 3, leaves_after=(8, 9, 10, 11, 11), max_lead=4)
        )
        own.check_trunk(second, [*_TRUNK, *_PATH])
        assert own.records[0].token_count == 3


async def test_branches_whose_pages_went_to_others_are_computed_again(llama: TinyModel) -> None:
    async with drafted(llama) as own:
        own.engine._worker._stepper._pages._free_spare_pages()
        poison_behind(own)
        second = await own.run(
            Branches(own.sequence, Delta(8, _PATH), 3, leaves_after=(8, 9, 10, 11, 11), max_lead=4)
        )
        own.check_trunk(second, [*_TRUNK, *_PATH])


def poison_behind(own: Drafted) -> None:
    for layer in own.engine._cache._arena.layers:
        for table in own.sequence.tables:
            layer.keys[table[0], len(_TRUNK) :] = float("nan")
            layer.padded_values[table[0], len(_TRUNK) :] = float("nan")


async def test_logits_beyond_the_bound_are_not_kept(llama: TinyModel) -> None:
    async with drafted(llama) as own:
        own.engine._worker._background._kept = KeptBranches(max_bytes=1)
        assert MAX_BYTES > 1
        await own.run(
            Branches(own.sequence, Delta(8, _PATH[:2]), 2, leaves_after=(8, 9, 10, 10, 10), max_lead=4)
        )
        assert own.engine._worker._background._kept.take(own.sequence, 4) is None


async def test_a_branch_that_cannot_be_taken_over_is_an_error_of_that_job(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    async with drafted(llama) as own:
        job = Branches(own.sequence, Delta(8, _PATH[:2]), 2, max_lead=4)
        with monkeypatch.context() as patched:
            patched.setattr(own.engine._cache, "take_over", out_of_memory)
            own.engine.put_back(job)
            async with asyncio.timeout(20):
                await job.done.wait()
        assert str(job.error) == "the model's step failed"
        more = await rows(own.engine, own.sequence, Delta(8, [7, 8]), 2)
        assert torch.allclose(more, plain_logits(llama.reference, [*_TRUNK, 7, 8])[-2:], atol=1e-3)
