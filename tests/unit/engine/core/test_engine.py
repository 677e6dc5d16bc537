"""Waiting, cancelling and failing in the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import (
    InvalidRequestError,
)
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.core.engines import _PROMPT, _BlockingHead
from tests.unit.engine.greedy import (
    Generation,
    GreedyHead,
    RowsHead,
    greedy,
    plain_logits,
    rows,
    running,
    settle,
)


async def test_a_step_that_does_not_end_is_overdue_until_it_does(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.loaded, head, step_timeout_seconds=0.05) as engine:
        sequence = await engine.open(16)
        task = asyncio.create_task(engine.run(Job(sequence, Delta(0, _PROMPT), 1, None)))
        await head.wait_entered()
        await asyncio.sleep(0.1)
        assert engine.overdue_seconds > 0.05
        head.may_leave.set()
        await task
        assert engine.overdue_seconds == 0.0
        engine.release(sequence)


async def test_a_delta_that_does_not_fit_is_the_callers_alone(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead()) as engine:
        sequence = await engine.open(8)
        good = rows(engine, await engine.open(8), Delta(0, _PROMPT), 1)
        for delta, row_count in [
            (Delta(1, [3]), 1),
            (Delta(0, [97]), 1),
            (Delta(0, [3] * 9), 1),
            (Delta(0, [3]), 2),
        ]:
            with pytest.raises(InvalidRequestError):
                await rows(engine, sequence, delta, row_count)
        assert torch.allclose(await good, plain_logits(llama.reference, _PROMPT)[-1:], atol=1e-4)
        await rows(engine, sequence, Delta(0, _PROMPT), 1)
    with pytest.raises(InvalidRequestError, match="The number of rows is -1 and must not be negative"):
        Job(sequence, Delta(0, ()), -1, None)


async def test_a_job_without_rows_only_fills_the_cache(llama: TinyModel) -> None:
    async with running(llama.backends, GreedyHead(), prefill_chunk_tokens=2) as engine:
        sequence = await engine.open(8)
        for _ in range(2):  # the second time there is nothing to do
            assert await engine.run(Job(sequence, Delta(0, _PROMPT), 0, Generation(1))) is None
        assert sequence.computed_length == engine.usage.used_tokens == len(_PROMPT)


async def test_a_head_that_continues_past_the_limit_is_an_error(llama: TinyModel) -> None:
    async with running(llama.backends, GreedyHead()) as engine:
        sequence = await engine.open(6)
        with pytest.raises(InvalidRequestError, match="The sequence would have 7 tokens, but its limit is 6"):
            await engine.run(Job(sequence, Delta(0, _PROMPT), 1, Generation(5)))


async def test_a_cancelled_job_stops_and_leaves_nothing(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.backends, head) as engine:
        sequence = await engine.open(190)
        task = asyncio.create_task(engine.run(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
        await head.wait_entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        head.may_leave.set()
        other = await engine.open(8)
        assert await engine.run(Job(other, Delta(0, _PROMPT), 1, "once")) == "done"
        assert head.calls == 2, "the cancelled job went on"
        assert await engine.run(Job(sequence, Delta(0, _PROMPT), 1, "once")) == "done", (
            "its sequence is usable"
        )
        engine.release(sequence)
        engine.release(other)
        await settle(engine)


async def test_releasing_takes_effect_between_steps(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.backends, head) as engine:
        sequence = await engine.open(190)
        task = asyncio.create_task(engine.run(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
        await head.wait_entered()
        engine.release(sequence)
        engine.release(sequence)
        await asyncio.sleep(0.02)
        assert engine.usage.reserved_tokens, "the step in progress still writes there"
        head.may_leave.set()
        with pytest.raises(InvalidRequestError, match="The sequence was released"):
            await task
        await settle(engine)
        with pytest.raises(InvalidRequestError, match="The sequence was released"):
            await engine.run(Job(sequence, Delta(0, _PROMPT), 1, "once"))


async def test_jobs_of_one_sequence_run_in_order(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead(), prefill_chunk_tokens=2) as engine:
        sequence = await engine.open(20)
        deltas = [Delta(0, _PROMPT), Delta(5, [9, 9]), Delta(6, [10]), Delta(0, [4, 4])]
        results = await asyncio.gather(*(rows(engine, sequence, delta, 1) for delta in deltas))
    texts = [_PROMPT, [*_PROMPT, 9, 9], [*_PROMPT, 9, 10], [4, 4]]
    for result, text in zip(results, texts, strict=True):
        assert torch.allclose(result, plain_logits(llama.reference, text)[-1:], atol=1e-4)


async def test_the_event_loop_stays_free_while_the_model_runs(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.backends, head) as engine:
        sequence = await engine.open(8)
        task = asyncio.create_task(engine.run(Job(sequence, Delta(0, _PROMPT), 1, "once")))
        await head.wait_entered()
        await asyncio.sleep(0)
        assert not task.done()
        head.may_leave.set()
        assert await task == "done"


async def test_every_step_is_recorded(llama: TinyModel) -> None:
    records: list[StepRecord] = []
    engine: Engine[Any, Any] = Engine(
        llama.loaded, GreedyHead(), EngineSettings(prefill_chunk_tokens=3), on_step=records.append
    )
    engine.start()
    await engine.warm_up()
    await settle(engine)
    records.clear()
    await greedy(engine, _PROMPT, 3)
    await engine.close()
    assert [record.token_count for record in records] == [3, 2, 1, 1]
    assert [record.row_count for record in records] == [0, 1, 1, 1]
    assert all(
        record.sequence_count == 1 and 0 < record.model_seconds <= record.seconds for record in records
    )


async def _one_by_one(engine: Engine[Any, Any], count: int, max_length: int = 60) -> Sequence:
    """Open a sequence and request its rows one after the other."""
    sequence = await engine.open(max_length)
    for length in range(1, count + 1):
        await engine.run(Job(sequence, Delta(0, (length,) * length), 1, None))
    return sequence


async def test_a_step_waits_for_the_sequences_of_the_last_one(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a timeout, only a returning sequence ends a wait, however slow the machine is.
    monkeypatch.setattr("tandem.engine.core.rejoin._PATIENCE", 1e6)
    records: list[StepRecord] = []
    engine = Engine(llama.loaded, RowsHead(), EngineSettings(), records.append)
    engine.start()

    async def one() -> None:
        engine.release(await _one_by_one(engine, 20))

    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*(one() for _ in range(3)))
    finally:
        await engine.close()
    together = [record.sequence_count for record in records]
    # One that comes a step later than the others ends a step later.
    assert together[2:-2] == [3] * len(together[2:-2]), (
        "all steps but the first and the last two hold all sequences"
    )
    assert len(together) <= 22


async def test_a_step_does_not_wait_for_a_sequence_that_was_released(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.core.rejoin._PATIENCE", 1e6)
    async with running(llama.backends, RowsHead()) as engine:
        async with asyncio.timeout(10):
            first, second = await _one_by_one(engine, 1), await engine.open(60)
            waiting = asyncio.create_task(engine.run(Job(second, Delta(0, (9,) * 9), 1, None)))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "the step waits for the first sequence"
            engine.release(first)
            assert len(await waiting) == 1


async def test_a_step_stops_waiting_for_a_silent_sequence(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead()) as engine:
        async with asyncio.timeout(10):
            _, second = await asyncio.gather(_one_by_one(engine, 3), _one_by_one(engine, 3))
            for length in range(4, 40):  # the first, still open, sends nothing more
                row = await engine.run(Job(second, Delta(0, (length,) * length), 1, None))
                assert len(row) == 1
