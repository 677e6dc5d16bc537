"""The choice of a step's sequences, whom it waits for, and how sequences that go on by themselves yield to others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from typing import Any

import pytest

from tandem.engine.core.engine import RowEngine
from tandem.engine.core.jobs import Job, StepRecord
from tandem.engine.core.scheduler import PageScheduler, RejoinWindow, next_segments
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.errors import TandemError
from tandem.model.types import (
    Delta,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem_target.verifier import Verifier
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import most_probable, started
from tests.unit.engine.kv_cache.test_pages import new_arena, new_sequence

_CHUNK = 100


def _job(pending: int, row_count: int = 1, computed: int = 0) -> Job[None]:
    """A job of a sequence that has had an answer, if it has computed anything."""
    sequence = Sequence((PageTable(64, 1024),), 1024, vocabulary_size=2)
    sequence.is_new = not computed
    sequence.apply(Delta(0, [1] * (computed + pending)))
    sequence.advance(computed)
    return Job(sequence, Delta(0, ()), row_count, None)


def _counts(*jobs: Job[None]) -> list[int]:
    chosen = {segment.sequence: segment.token_count for segment in next_segments(jobs, _CHUNK)}
    return [chosen.get(job.sequence, 0) for job in jobs]


@pytest.mark.parametrize(
    ("jobs", "counts"),
    [
        pytest.param([(500,), (1, 1, 40), (6, 6, 9)], [100, 1, 6], id="short work beside a long prompt"),
        pytest.param([(500,), (10,), (20,)], [70, 10, 20], id="a short prompt before a long one"),
        pytest.param([(60,), (60,), (60,)], [60, 40, 0], id="long prompts share a chunk, oldest first"),
        pytest.param([(100,)], [100], id="a chunk"),
        pytest.param([(101,)], [100], id="more than a chunk"),
        pytest.param([(103, 4)], [99], id="rows are not split over steps"),
        pytest.param([(150, 150)], [150], id="rows of everything at once"),
    ],
)
def test_what_goes_into_a_step(jobs: list[tuple[int, ...]], counts: list[int]) -> None:
    assert _counts(*(_job(*each) for each in jobs)) == counts


def test_rows_that_are_kept_apart_wait_for_the_tokens_before_them() -> None:
    """Also those of a round, and of a prompt that is longer than a chunk."""
    jobs = [_job(7, 5, computed=40), _job(5, 5, computed=40), _job(9, 1, computed=40), _job(103, 4)]
    for job in jobs:
        job.sequence.keeps_rows_apart = True
    assert _counts(*jobs) == [2, 5, 9, 99]


def test_rounds_always_run_and_short_prompts_share_a_chunk() -> None:
    """Forty prompts of which others have computed all but the ends would make a step of a thousand tokens."""
    rounds = [_job(5, 5, computed=40) for _ in range(30)]
    prompts = [_job(30) for _ in range(40)]
    assert _counts(*prompts, *rounds) == [30, 30, 30, *[0] * 37, *[5] * 30]


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
        batch = self.ready
        self.ready = set()
        began = self.now
        ended = self.now + milliseconds
        while self.now < ended:
            self.wait(ended - self.now)
        for sequence in batch:
            due = self.now + self.delays[sequence]
            heapq.heappush(self._returns, (due, next(self._order), sequence))
        self.window.expect(batch, began, self.now)
        return batch


def test_two_groups_become_one_whatever_a_slow_client_does() -> None:
    """One of nine sequences is slow, and two groups of the others alternate to begin with."""
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


def paged(free: int) -> tuple[PageScheduler, list[Sequence]]:
    """A scheduler with so many free pages, and three sequences that each need one more for their next token. The first
    runs ahead of what was asked for, and the last is the youngest."""
    cache = PagedCache(new_arena(5 + free), reuses_prefixes=False)
    first, *others = [new_sequence() for _ in range(4)]
    for sequence in (first, *others):
        sequence.apply(Delta(0, [5] * 65))
        assert cache.make_ready(sequence, 64)
        sequence.advance(64)
    assert cache.make_ready(first, 65), "nobody begins with the last page, but who has begun may take it"
    return PageScheduler(cache, lambda _: None, lambda sequence: sequence is others[0]), others


@pytest.mark.parametrize(("free", "ready"), [(0, [1]), (1, [1]), (2, [0, 1])])
def test_where_pages_are_short_leads_stop_first(free: int, ready: list[int]) -> None:
    scheduler, sequences = paged(free)
    found = scheduler.with_pages([Segment(sequence, 1) for sequence in sequences[:2]])
    assert [segment.sequence for segment in found] == [sequences[index] for index in ready]
    assert (sequences[2].computed_length == 0) == (not free), "for the one that somebody waits for"


def test_a_lead_alone_takes_no_page_of_others() -> None:
    scheduler, sequences = paged(0)
    assert scheduler.with_pages([Segment(sequences[0], 1)]) == []
    assert [sequence.computed_length for sequence in sequences] == [64] * 3


async def test_a_lead_delays_no_other_sequence(llama: TinyModel) -> None:
    """A prompt that comes while a step of a lead runs is in the next step, beside the lead."""
    may_go_on = threading.Event()
    is_held = threading.Event()
    steps: list[int] = []

    def on_step(record: StepRecord) -> None:
        steps.append(record.sequence_count)
        if len(steps) == 3:  # the second one of the lead
            is_held.set()
            assert may_go_on.wait(10)

    async with started(RowEngine(llama.backends, EngineSettings(), on_step)) as engine:
        leading = await engine.open(100)
        other = await engine.open(100)
        greedy = TargetOptions("r", SamplingParams(temperature=0.0), 100)
        step = VerifyStep(Delta(0, [5, 6, 7]), RowKind.TOKEN, 1, lead=8)
        await engine.run(leading, RowRequest(step, greedy, on_led=lambda *_: None))
        assert await asyncio.to_thread(is_held.wait, 10)
        step = VerifyStep(Delta(0, [8] * 40), RowKind.TOKEN, 1)
        first = asyncio.create_task(engine.run(other, RowRequest(step, greedy)))
        await asyncio.sleep(0)  # it is submitted
        may_go_on.set()
        await asyncio.wait_for(first, 10)
        assert steps[3] == 2


async def test_sequences_that_run_ahead_share_few_pages(llama: TinyModel) -> None:
    """Five of them need fifteen pages, and there are six."""
    prompts = [[(13 * number + step) % 90 + 3 for step in range(60)] for number in range(5)]
    page_bytes = 64 * 4 * sum(layer.values_per_token for layer in llama.loaded.layers)
    limits = EngineSettings(max_length=140, kv_cache_bytes=6 * page_bytes)

    async def completed(verifier: Verifier, prompt: list[int]) -> list[int]:
        answers: asyncio.Queue[Verification | TandemError] = asyncio.Queue()
        options = TargetOptions("r", SamplingParams(temperature=0.0), 140, prompt_length=60)
        async with verifier.sequence(options, answers.put_nowait) as sequence:
            step = VerifyStep(Delta(0, prompt), RowKind.TOKEN, 1, lead=8)
            answer: Verification | TandemError = await sequence.verify(step)
            tokens: list[int] = []
            while True:
                assert isinstance(answer, Verification)
                tokens += [row.token_id for row in answer.rows if isinstance(row, TokenRow)]
                if len(tokens) == 80:
                    return tokens
                delta = Delta(59 + len(tokens), (tokens[-1],))
                assert sequence.confirms(VerifyStep(delta, RowKind.TOKEN, 1, lead=8))
                answer = await answers.get()

    async with asyncio.timeout(60), started(RowEngine(llama.backends, limits)) as engine:
        verifier = Verifier(engine, ())
        found = await asyncio.gather(*(completed(verifier, prompt) for prompt in prompts))
        assert engine.usage.preemption_count > 0
        assert engine.usage.led_step_count == 5 * 79
        assert engine.usage.wasted_step_count == 0
    assert found == [most_probable(llama.reference, *both) for both in zip(prompts, found, strict=True)]
