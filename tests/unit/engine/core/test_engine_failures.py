"""Failing steps, mistakes in the thread and logits that are not finite harm nothing else."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
from tandem.engine.core.jobs import Continue, Done, Job
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import (
    ServiceUnavailableError,
    TandemError,
)
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.core.engines import _PROMPT, _BlockingHead
from tests.unit.engine.greedy import (
    Generation,
    GreedyHead,
    RowsHead,
    greedy,
    greedy_together,
    plain_greedy,
    rows,
    running,
    settle,
)


class _FailsOnce:
    """A head that fails the first time."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def __call__(self, ready: SequenceOf[Job[None]], logits: Tensor) -> list[Done[str] | Continue]:
        if self._errors:
            raise self._errors.pop()
        return [Done("done") for _ in ready]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("no memory at 0x7f"), "The model's step failed; the service's log says why."),
        (TandemError("A reason."), "A reason."),
    ],
)
async def test_a_step_that_fails_is_not_the_end(llama: TinyModel, error: Exception, sentence: str) -> None:
    async with running(llama.backends, _FailsOnce(error)) as engine:
        sequence = await engine.open(8)
        with pytest.raises(TandemError) as raised:
            await engine.run(Job(sequence, Delta(0, _PROMPT), 1, None))
        assert str(raised.value) == sentence
        assert await engine.run(Job(sequence, Delta(0, _PROMPT), 1, None)) == "done"


async def test_closing_the_engine_ends_every_wait(llama: TinyModel) -> None:
    head = _BlockingHead()
    engine: Engine[Any, Any] = Engine(llama.loaded, head, EngineSettings(max_sequences=1))
    with pytest.raises(ServiceUnavailableError):
        await engine.open(8)
    await engine.close()  # never started
    engine.start()
    sequence = await engine.open(190)
    job = asyncio.create_task(engine.run(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
    waiting = asyncio.create_task(engine.open(8))
    await head.wait_entered()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    head.may_leave.set()
    await closing
    await engine.close()
    for task in (job, waiting):
        with pytest.raises(ServiceUnavailableError, match="The engine is shutting down"):
            await task
    with pytest.raises(ServiceUnavailableError, match="The engine is not running"):
        await engine.run(Job(sequence, Delta(0, _PROMPT), 1, "once"))
    assert not [thread for thread in threading.enumerate() if thread.name == "tandem-engine"]


async def test_an_exception_in_the_thread_ends_every_wait(llama: TinyModel) -> None:
    def broken(record: StepRecord) -> None:
        raise KeyError("a bug")

    gave_up = asyncio.Event()
    engine: Engine[Any, Any] = Engine(
        llama.loaded, RowsHead(), EngineSettings(), on_step=broken, on_failure=gave_up.set
    )
    engine.start()
    sequence, other = await engine.open(8), await engine.open(8)
    jobs = [rows(engine, sequence, Delta(0, _PROMPT), 1) for _ in range(2)]
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5)
    assert [type(result) for result in results] == [Tensor, ServiceUnavailableError]
    with pytest.raises(ServiceUnavailableError):
        await asyncio.wait_for(rows(engine, other, Delta(0, _PROMPT), 1), 5)
    assert not engine.is_running
    await asyncio.wait_for(gave_up.wait(), 5)
    await engine.close()


async def test_an_engine_whose_steps_all_fail_gives_up(llama: TinyModel) -> None:
    def broken(ready: SequenceOf[Job[None]], logits: Tensor) -> list[Done[str] | Continue]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    gave_up = asyncio.Event()
    engine: Engine[Any, Any] = Engine(llama.loaded, broken, EngineSettings(), on_failure=gave_up.set)
    engine.start()
    sequence = await engine.open(8)
    for _ in range(8):
        assert not gave_up.is_set()
        with pytest.raises(TandemError):
            await asyncio.wait_for(engine.run(Job(sequence, Delta(0, _PROMPT), 1, None)), 5)
    await asyncio.wait_for(gave_up.wait(), 5)
    assert not engine.is_running
    await engine.close()


async def test_an_engine_that_is_closed_has_not_failed(llama: TinyModel) -> None:
    failures: list[str] = []
    engine: Engine[Any, Any] = Engine(
        llama.loaded, RowsHead(), EngineSettings(), on_failure=lambda: failures.append("told")
    )
    engine.start()
    await engine.close()
    await asyncio.sleep(0.05)
    assert failures == []


def _fill(engine: Engine[Any, Any], pages: SequenceOf[int], value: float) -> None:
    for layer in engine._cache._arena.layers:
        layer.keys[pages] = value
        layer.values[pages] = value


async def test_freed_memory_is_never_read(mistral: TinyModel) -> None:
    prompts = [[(7 * index + step) % 90 + 3 for step in range(1 + 5 * index)] for index in range(8)]
    expected = [plain_greedy(mistral.reference, prompt, 12) for prompt in prompts]
    async with running(
        mistral.loaded, GreedyHead(), prefix_reuse=False, max_sequences=8, max_length=64
    ) as engine:
        _fill(engine, range(engine.usage.total_tokens // 64), math.nan)
        assert await greedy_together(engine, prompts, 12) == expected
        await settle(engine)
        _fill(engine, range(engine.usage.total_tokens // 64), math.nan)
        assert await greedy_together(engine, prompts[::-1], 12) == expected[::-1]


async def test_nan_in_one_sequence_does_not_reach_others(mistral: TinyModel) -> None:
    expected = plain_greedy(mistral.reference, _PROMPT, 20)
    async with running(
        mistral.loaded, GreedyHead(), prefix_reuse=False, max_sequences=3, max_length=64
    ) as engine:
        sick: list[Sequence] = [await engine.open(64) for _ in range(2)]
        between = asyncio.create_task(greedy(engine, _PROMPT, 20))
        for sequence in sick:
            await engine.run(Job(sequence, Delta(0, _PROMPT), 0, Generation(1)))
            _fill(engine, sequence.table.pages, math.nan)
        generations = [
            engine.run(Job(sequence, Delta(len(_PROMPT), [3]), 1, Generation(20))) for sequence in sick
        ]
        await asyncio.gather(*generations)
        assert await between == expected
