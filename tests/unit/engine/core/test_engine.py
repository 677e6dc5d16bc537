"""The engine batches jobs, survives failures, hands pages on, notices hangs, and serves clients that do anything."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.core import scheduler
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Continue, Done, Job, StepRecord
from tandem.engine.core.selection import Backends
from tandem.engine.core.timing import LEAST_SECONDS, MARGIN, MOST_SECONDS, StepTimes, StepWatchdog
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.steps import StepBackend
from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.model.types import Delta
from tests.service.clients import until
from tests.unit.engine.conftest import MakeModel, TinyModel
from tests.unit.engine.greedy import (
    Generation,
    GreedyHead,
    RowsHead,
    greedy,
    greedy_together,
    plain_greedy,
    plain_logits,
    rows,
    running,
    settle,
)

_PROMPT = [5, 17, 80, 3, 44]


class _BlockingHead:
    """A head that waits to be let through, so that a test can act while a step is in progress."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_leave = threading.Event()
        self.calls = 0

    def __call__(self, ready: SequenceOf[Job[Any]], logits: Tensor) -> list[Done[str] | Continue]:
        self.calls += 1
        self.entered.set()
        assert self.may_leave.wait(10)
        return [Continue(3) if job.payload == "forever" else Done("done") for job in ready]

    async def wait_entered(self) -> None:
        """Until a step has reached the head."""
        assert await asyncio.to_thread(self.entered.wait, 10)


async def test_a_step_that_does_not_end_is_overdue_until_it_does(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.loaded, head, step_timeout_seconds=0.05) as engine:
        sequence = await engine.open(16)
        task = asyncio.create_task(engine.submit(Job(sequence, Delta(0, _PROMPT), 1, None)))
        await head.wait_entered()
        await until(lambda: engine.overdue_seconds > 0.05, 10.0)
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


async def test_a_job_without_rows_only_fills_the_cache(llama: TinyModel) -> None:
    async with running(llama.backends, GreedyHead(), prefill_chunk_tokens=2) as engine:
        sequence = await engine.open(8)
        for _ in range(2):  # the second time there is nothing to do
            assert await engine.submit(Job(sequence, Delta(0, _PROMPT), 0, Generation(1))) is None
        assert sequence.computed_length == engine.usage.used_tokens == len(_PROMPT)


async def test_steps_since_the_warm_up_are_counted_by_their_tokens(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead()) as engine:
        await engine.warm_up()
        assert sum(engine.usage.step_tokens.counts) == 0
        sequence = await engine.open(8)
        await rows(engine, sequence, Delta(0, _PROMPT), 1)
        await rows(engine, sequence, Delta(len(_PROMPT), [1]), 1)
        usage = engine.usage
    assert usage.step_tokens.token_sum == len(_PROMPT) + 1
    by_bound = dict(zip(usage.step_tokens.upper_bounds, usage.step_tokens.counts, strict=False))
    assert [bound for bound, count in by_bound.items() if count] == [1, 5]
    assert (usage.page_tokens, usage.reuses_prefixes) == (64, True)
    assert usage.statistics.kv_cache_tokens == usage.total_tokens > 0


async def test_a_head_that_continues_past_the_limit_is_an_error(llama: TinyModel) -> None:
    async with running(llama.backends, GreedyHead()) as engine:
        sequence = await engine.open(6)
        with pytest.raises(InvalidRequestError, match="7 tokens, but its limit is 6"):
            await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, Generation(5)))


async def test_a_cancelled_job_stops_and_leaves_nothing(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.backends, head) as engine:
        sequence = await engine.open(190)
        task = asyncio.create_task(engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
        await head.wait_entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        head.may_leave.set()
        other = await engine.open(8)
        assert await engine.submit(Job(other, Delta(0, _PROMPT), 1, "once")) == "done"
        assert head.calls == 2, "the cancelled job went on"
        assert await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "once")) == "done", (
            "its sequence is usable"
        )
        engine.release(sequence)
        engine.release(other)
        await settle(engine)


async def test_releasing_takes_effect_between_steps(llama: TinyModel) -> None:
    head = _BlockingHead()
    async with running(llama.backends, head) as engine:
        sequence = await engine.open(190)
        task = asyncio.create_task(engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
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
            await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "once"))


async def test_a_step_does_not_wait_for_a_sequence_that_was_released(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.core.scheduler.PATIENCE", 1e6)
    async with running(llama.backends, RowsHead()) as engine:
        async with asyncio.timeout(10):
            first, second = [await engine.open(60) for _ in range(2)]
            await rows(engine, first, Delta(0, (1,)), 1)
            waiting = asyncio.create_task(rows(engine, second, Delta(0, (9,) * 9), 1))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "the step waits for the first sequence"
            engine.release(first)
            assert len(await waiting) == 1


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
            await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, None))
        assert str(raised.value) == sentence
        assert await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, None)) == "done"


async def test_closing_the_engine_ends_every_wait(llama: TinyModel) -> None:
    head = _BlockingHead()
    engine: Engine[Any, Any] = Engine(Backends(llama.loaded), head, EngineSettings(max_sequences=1))
    with pytest.raises(ServiceUnavailableError):
        await engine.open(8)
    await engine.close()  # never started
    engine.start()
    sequence = await engine.open(190)
    job = asyncio.create_task(engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "forever")))
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
        await engine.submit(Job(sequence, Delta(0, _PROMPT), 1, "once"))
    assert not [thread for thread in threading.enumerate() if thread.name == "tandem-engine"]


async def test_an_exception_in_the_thread_ends_every_wait(llama: TinyModel) -> None:
    def broken(record: StepRecord) -> None:
        raise KeyError("a bug")

    gave_up = asyncio.Event()
    async with running(llama.loaded, RowsHead(), on_step=broken, on_failure=gave_up.set) as engine:
        sequence, other = await engine.open(8), await engine.open(8)
        jobs = [rows(engine, sequence, Delta(0, _PROMPT), 1) for _ in range(2)]
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5)
        assert [type(result) for result in results] == [ServiceUnavailableError] * 2
        with pytest.raises(ServiceUnavailableError):
            await asyncio.wait_for(rows(engine, other, Delta(0, _PROMPT), 1), 5)
        await asyncio.wait_for(gave_up.wait(), 5)


async def test_an_engine_whose_steps_all_fail_gives_up(llama: TinyModel) -> None:
    def broken(ready: SequenceOf[Job[None]], logits: Tensor) -> list[Done[str] | Continue]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    gave_up = asyncio.Event()
    async with running(llama.loaded, broken, on_failure=gave_up.set) as engine:
        sequence = await engine.open(8)
        for _ in range(8):
            assert not gave_up.is_set()
            with pytest.raises(TandemError):
                await asyncio.wait_for(engine.submit(Job(sequence, Delta(0, _PROMPT), 1, None)), 5)
        await asyncio.wait_for(gave_up.wait(), 5)


def _fill(engine: Engine[Any, Any], pages: SequenceOf[int], value: float) -> None:
    for layer in engine._cache._arena.layers:  # type: ignore[attr-defined]
        layer.keys[pages] = value
        layer.values[pages] = value


@pytest.mark.parametrize("attention", ["kernels", "torch"])
async def test_freed_memory_is_never_read(mistral: TinyModel, attention: str) -> None:
    backends = mistral.backends if attention == "kernels" else mistral.loaded
    prompts = [[(7 * index + step) % 90 + 3 for step in range(1 + 5 * index)] for index in range(8)]
    expected = [plain_greedy(mistral.reference, prompt, 12) for prompt in prompts]
    async with running(backends, GreedyHead(), prefix_reuse=False, max_sequences=8, max_length=64) as engine:
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
            await engine.submit(Job(sequence, Delta(0, _PROMPT), 0, Generation(1)))
            _fill(engine, sequence.table.pages, math.nan)
        generations = [
            engine.submit(Job(sequence, Delta(len(_PROMPT), [3]), 1, Generation(20))) for sequence in sick
        ]
        await asyncio.gather(*generations)
        assert await between == expected


_PAGE_TOKENS = 64


def _kv_bytes(model: TinyModel, tokens: int) -> int:
    return tokens * 4 * sum(layer.values_per_token for layer in model.loaded.layers)


async def test_pages_of_idle_sequences_go_to_those_that_could_not_run(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.02)
    room = _kv_bytes(llama, 3 * _PAGE_TOKENS)
    async with running(llama.backends, RowsHead(), kv_cache_bytes=room, prefix_reuse=False) as engine:
        idle, busy = await engine.open(192), await engine.open(192)
        tokens = [7] * 150
        await rows(engine, idle, Delta(0, tokens), 1)
        last = await asyncio.wait_for(rows(engine, busy, Delta(0, [8] * 100), 1), 10)
        assert torch.allclose(last, plain_logits(llama.reference, [8] * 100)[-1:], atol=1e-4)
        assert idle.computed_length == 0
        again = await rows(engine, idle, Delta(150, [9]), 1)
        assert torch.allclose(again, plain_logits(llama.reference, [*tokens, 9])[-1:], atol=1e-4)


async def test_no_more_than_max_sequences_are_open(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead(), max_sequences=1, max_waiting=1) as engine:
        held = await engine.open(8)
        waiting = asyncio.create_task(engine.open(8))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="1 sequences are open and 1 requests are waiting"):
            await engine.open(8)
        engine.release(held)
        engine.release(await waiting)
        await settle(engine)


@pytest.mark.parametrize("max_length", [0, -1, 193])
async def test_unserved_lengths_are_refused(llama: TinyModel, max_length: int) -> None:
    async with running(llama.backends, RowsHead()) as engine:
        with pytest.raises(InvalidRequestError, match=f"up to {max_length} tokens .* serves 1 to 192"):
            await engine.open(max_length)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_length": 193}, "max_length is 193, .* made for at most 192 tokens"),
        ({"kv_cache_bytes": 1000}, "may take 1000 bytes, but one sequence of max_length 192 needs 49152"),
    ],
)
async def test_impossible_settings_are_refused(
    llama: TinyModel, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Engine(Backends(llama.loaded), RowsHead(), EngineSettings(**settings))


async def test_a_warm_engine_knows_its_step_times(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sequences and tokens; sizes for which there is no room are missing."""
    monkeypatch.setattr("tandem.engine.core.engine.WARM_UP_SECONDS", 1e6)
    async with running(llama.backends, GreedyHead(), max_sequences=4) as engine:
        assert not engine.info.step_profile.seconds
        await engine.warm_up()
        assert {(1, 1), (2, 5), (4, 9)} <= engine.info.step_profile.seconds.keys()
        assert all(seconds > 0.0 for seconds in engine.info.step_profile.seconds.values())
        assert max(count for count, _ in engine.info.step_profile.seconds) == 4
        await settle(engine)


async def test_step_times_contain_what_the_observer_of_steps_takes(llama: TinyModel) -> None:
    """Whoever waits for a step waits for that too: a paced step is as long to the coordinator as to its clients."""

    def hold_up(_: StepRecord) -> None:
        time.sleep(0.02)

    async with running(llama.backends, GreedyHead(), on_step=hold_up, max_sequences=1) as engine:
        await engine.warm_up()
        assert min(engine.info.step_profile.seconds.values()) >= 0.02
        await settle(engine)


def test_steps_that_take_another_time_than_published_are_published_anew() -> None:
    """By a quarter, in the mean: one pause is none, and a step without a row for each token tells nothing."""
    times = StepTimes()
    times.measured({(1, 1): 0.01, (4, 5): 0.02})
    for record in (StepRecord(1, 1, 1, 0.0, 1.0), *[StepRecord(4, 20, 4, 0.0, 1.0)] * 50):
        times.add(record)
    assert times.profile.seconds == {(1, 1): 0.01, (4, 5): 0.02}
    for _ in range(50):
        times.add(StepRecord(4, 20, 20, 0.0, 0.03))
    assert times.profile.seconds[4, 5] > 0.025
    assert times.profile.seconds[1, 1] == pytest.approx(0.01, rel=0.05)


class Watched(StepWatchdog):
    """Steps of so many seconds, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now)

    def step(self, tokens: int, seconds: float) -> None:
        self.begin(tokens)
        self.now += seconds
        self.end()


def test_a_large_step_of_a_slow_model_has_time() -> None:
    """Warm-up ran one token in a second, so 100 of them may take as many seconds, and then some."""
    watchdog = Watched()
    watchdog.step(tokens=1, seconds=1.0)
    assert watchdog.bound_seconds(100) == pytest.approx(MARGIN * 100)
    assert watchdog.bound_seconds(10_000) == MOST_SECONDS
    assert watchdog.bound_seconds(1) == LEAST_SECONDS


def test_a_first_step_that_compiles_is_forgotten() -> None:
    watchdog = Watched()
    watchdog.step(tokens=1, seconds=20.0)
    assert watchdog.bound_seconds(512) == MOST_SECONDS
    for _ in range(400):
        watchdog.step(tokens=1, seconds=0.01)
    assert watchdog.bound_seconds(512) == LEAST_SECONDS


_MAX_LENGTH = 96
_TOTAL_TOKENS = 3 * 128


@dataclass
class Client:
    """One user of the engine, who opens sequences, extends, rolls back, repeats, cancels and releases."""

    engine: Engine[Any, Any]
    reference: Any
    draw: random.Random
    text: list[int] = field(default_factory=list)
    is_sure: bool = True
    """True if the engine is known to have the same text; False after a cancelled request."""
    answers: list[tuple[asyncio.Task[Tensor], list[int], int]] = field(default_factory=list)
    """Requests in flight: the task, the tokens that it should see, and its number of rows."""
    compared: int = 0
    """Rows that were compared with the reference's."""

    async def act(self, count: int) -> None:
        sequence = await self._opened()
        for _ in range(count):
            match self.draw.randrange(8):
                case 0 if self.text:  # the whole text again, as to a fresh replica
                    self._say(sequence, Delta(0, list(self.text)))
                case 1 if self.answers:
                    await self._turns()
                    self.answers.pop()[0].cancel()
                    self.is_sure = False
                case 2:
                    await self._check()
                case 3 if self.draw.random() < 0.3:
                    await self._leave(sequence)
                    sequence = await self._opened()
                case _:
                    # Few ids, so that texts often agree by chance.
                    new = [self.draw.randrange(3, 7) for _ in range(self.draw.randrange(1, 31))]
                    length = len(self.text)
                    base = self.draw.choice((length, length, self.draw.randrange(length + 1)))
                    base = base if self.is_sure else 0
                    self._say(sequence, Delta(min(base, _MAX_LENGTH - len(new)), new))
            await self._turns()
        await self._check()
        self.engine.release(sequence)

    async def _opened(self) -> Sequence:
        while self.draw.random() < 0.3:  # it gives up waiting
            with suppress(TimeoutError):
                self.engine.release(await asyncio.wait_for(self.engine.open(_MAX_LENGTH), 0.0005))
        self.text, self.is_sure = [], True
        return await self.engine.open(_MAX_LENGTH)

    def _say(self, sequence: Sequence, delta: Delta) -> None:
        self.text[delta.base_length :] = delta.token_ids
        self.is_sure = self.is_sure or delta.base_length == 0
        rows = self.draw.randrange(len(self.text) + 1)
        job = Job(sequence, delta, rows, None)
        self.answers.append((asyncio.create_task(self.engine.submit(job)), list(self.text), rows))

    async def _check(self) -> None:
        for task, text, count in self.answers:
            rows = await asyncio.wait_for(task, 20)
            if count:
                assert torch.allclose(rows, plain_logits(self.reference, text)[-count:], atol=1e-3)
                self.compared += count
        self.answers.clear()

    async def _leave(self, sequence: Sequence) -> None:
        """Release the sequence, with or without waiting for the answers."""
        if self.draw.random() < 0.5:
            await self._check()
        for task, _, _ in self.answers:
            task.cancel()
        self.answers.clear()
        self.engine.release(sequence)

    async def _turns(self) -> None:
        for _ in range(self.draw.randrange(3)):
            await asyncio.sleep(0.0005)
        usage = self.engine.usage
        assert usage.total_tokens == _TOTAL_TOKENS
        assert usage.reserved_tokens + usage.retained_tokens <= _TOTAL_TOKENS


class EarlyBackends(Backends):
    """Steps that the engine takes for those of a device."""

    def steps(self, arena: KvArena) -> StepBackend:
        backend = super().steps(arena)
        backend.returns_early = True
        return backend


@pytest.mark.parametrize(
    ("family", "chunk", "prefix_reuse", "returns_early"),
    [
        ("llama", 5, True, False),
        ("llama", 64, False, False),
        ("mistral", 5, True, False),
        ("falcon", 64, True, False),
        ("llama", 5, True, True),
        ("mistral", 5, True, True),
    ],
)
async def test_random_interleavings(
    family: str,
    chunk: int,
    prefix_reuse: bool,
    returns_early: bool,
    tiny_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.02)  # clients sit on their pages as long as they like
    model = tiny_model(family)
    backends = model.backends if model.backends.native is None else model.with_plans
    if returns_early:
        backends = EarlyBackends(backends.model, backends.native)
    limits: dict[str, Any] = {"max_length": _MAX_LENGTH, "max_sequences": 6}
    limits["kv_cache_bytes"] = _kv_bytes(model, _TOTAL_TOKENS)
    limits |= {"prefix_reuse": prefix_reuse, "prefill_chunk_tokens": chunk}
    async with running(backends, RowsHead(), **limits) as engine:
        clients = [Client(engine, model.reference, random.Random(n)) for n in range(9)]
        while not engine.usage.preemption_count:  # how requests meet is a matter of time
            await asyncio.gather(*(client.act(30) for client in clients))
        await settle(engine)
        assert min(client.compared for client in clients) > 0
