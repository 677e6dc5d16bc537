"""What goes into a step, whom it waits for, and how sequences that go on by themselves yield to others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

from tandem.engine.core.engine import RowEngine
from tandem.engine.core.jobs import Job, Leads, StepRecord
from tandem.engine.core.scheduler import PageScheduler, RejoinWindow, next_segments
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.errors import TandemError
from tandem.grammar import MaskArray
from tandem.types import Delta, RowKind, SamplingParams, TargetOptions, TokenRow, Verification, VerifyStep
from target_service.verifier import Verifier
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import plain_greedy

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


class Led:
    """A sequence whose jobs follow each other. The sequence itself is of no concern."""

    def __init__(self, lead: int) -> None:
        self.leads = Leads()
        self.sequence: Any = object()
        self.job = self._job(lead)
        self.begun: list[Job[None]] = []

    def _job(self, lead: int = 0) -> Job[None]:
        return Job(self.sequence, Delta(0, ()), 1, None, lead)

    def answered(self) -> bool:
        """The latest job was answered; true if another has begun."""
        following = self._job()
        begins = self.leads.follow(self.job, following)
        self.job = following
        return self._begin(begins)

    def asked(self, number: int, lead: int) -> bool:
        """Somebody asked for the job of this number; true if another has begun."""
        return self._begin(self.leads.grant(self.sequence, number, lead))

    def _begin(self, job: Job[None] | None) -> bool:
        if job is None:
            return False
        assert job is self.job, "the latest"
        assert job not in self.begun, "only once"
        self.begun.append(job)
        return True

    def ended(self) -> int:
        """The lead ends; how many jobs were for nothing."""
        assert self.leads.end(self.sequence)
        assert not self.leads.end(self.sequence), "it has ended"
        return self.leads.wasted_count


@pytest.mark.parametrize("lead", [0, 1, 8])
def test_as_many_jobs_begin_as_are_allowed(lead: int) -> None:
    led = Led(lead)
    assert [led.answered() for _ in range(lead)] == [True] * lead
    assert led.leads.is_ahead(led.sequence) == (lead > 0)
    assert not led.answered(), "the last one waits"
    assert led.ended() == led.leads.begun_count == lead


def test_a_question_lets_the_next_begin() -> None:
    led = Led(1)
    assert led.answered()
    assert not led.answered()
    assert led.asked(1, 1)
    assert led.leads.is_ahead(led.sequence)
    assert not led.asked(2, 0), "it runs already"
    assert not led.leads.is_ahead(led.sequence)
    assert not led.answered()
    assert led.ended() == 0


class Pages:
    """A cache with so many free pages, of which each sequence needs one for its next step."""

    def __init__(self, free: int, *holders: Any) -> None:
        self.free = free
        self.holders = list(holders)
        self.ready: set[Any] = set()
        self.preempted: list[Any] = []

    def is_ready(self, sequence: Any, _: int) -> bool:
        return sequence in self.ready

    def make_ready(self, sequence: Any, _: int) -> bool:
        if sequence not in self.ready and self.free:
            self.free -= 1
            self.ready.add(sequence)
        return sequence in self.ready

    def preempt(self, sequence: Any) -> None:
        self.preempted.append(sequence)
        self.holders.remove(sequence)
        self.free += 1

    def trim(self, sequence: Any) -> None:
        pass


@dataclass(eq=False)
class Numbered:
    """A sequence by its age, or a segment of it."""

    serial: int
    idle_since: float = math.inf
    end: int = 1

    @property
    def sequence(self) -> Numbered:
        return self


def segments(*serials: int) -> list[Any]:
    return [Numbered(serial) for serial in serials]


@pytest.mark.parametrize(("free", "ready"), [(0, [1]), (1, [1]), (2, [1, 0])])
def test_where_pages_are_short_leads_stop_first(free: int, ready: list[int]) -> None:
    led, waited, other = segments(1, 2, 3)
    cache = Pages(free, led.sequence, waited.sequence, other.sequence)
    scheduler = PageScheduler(cast("Any", cache), lambda _: None, lambda sequence: sequence is led.sequence)
    both = [led, waited]
    assert scheduler.with_pages(both) == [both[index] for index in sorted(ready)]
    assert cache.preempted == ([other.sequence] if not free else []), "for the one that somebody waits for"


def test_a_lead_alone_takes_no_page_of_others() -> None:
    led, other = segments(1, 2)
    cache = Pages(0, led.sequence, other.sequence)
    assert PageScheduler(cast("Any", cache), lambda _: None, lambda _: True).with_pages([led]) == []
    assert cache.preempted == []


async def test_a_lead_delays_no_other_sequence(llama: TinyModel) -> None:
    """A prompt that comes while a step of a lead runs is in the next step, beside the lead."""
    may_go_on, is_held = threading.Event(), threading.Event()
    steps: list[int] = []

    def on_step(record: StepRecord) -> None:
        steps.append(record.sequence_count)
        if len(steps) == 3:  # the second one of the lead
            is_held.set()
            assert may_go_on.wait(10)

    engine = RowEngine(llama.backends, EngineSettings(), on_step)
    engine.start()
    try:
        leading, other = await engine.open(100), await engine.open(100)
        greedy = SamplingParams(temperature=0.0)
        step = VerifyStep(Delta(0, [5, 6, 7]), RowKind.TOKEN, 1, lead=8)
        await engine.run(leading, RowRequest(step, greedy, max_length=100, on_led=lambda _: None))
        assert await asyncio.to_thread(is_held.wait, 10)
        step = VerifyStep(Delta(0, [8] * 40), RowKind.TOKEN, 1)
        first = asyncio.create_task(engine.run(other, RowRequest(step, greedy, max_length=100)))
        await asyncio.sleep(0)  # it is submitted
        may_go_on.set()
        await asyncio.wait_for(first, 10)
        assert steps[3] == 2
    finally:
        may_go_on.set()
        await engine.close()


async def test_masks_are_computed_beside_the_pass(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    are_begun = threading.Event()

    class Only7:
        def masks(self, before: SequenceOf[int], proposed: SequenceOf[int]) -> MaskArray:
            are_begun.set()
            rows = np.zeros((len(proposed) + 1, 2 * -(-llama.loaded.info.vocabulary_size // 64)), np.int32)
            rows[:, 0] = 1 << 7
            return rows

    engine = RowEngine(llama.backends, EngineSettings())
    run = engine._runner.run

    def waiting(segments: SequenceOf[Segment], rows: SequenceOf[int]) -> torch.Tensor:
        assert are_begun.wait(10)
        return run(segments, rows)

    monkeypatch.setattr(engine._runner, "run", waiting)
    engine.start()
    try:
        sequence = await engine.open(100)
        step = VerifyStep(Delta(0, [5, 6, 7]), RowKind.TOKEN, 1)
        request = RowRequest(step, SamplingParams(temperature=0.0), 3, grammar=cast("Any", Only7()))
        assert (await engine.run(sequence, request)).rows == (TokenRow(7),)
    finally:
        await engine.close()


async def test_sequences_that_run_ahead_share_few_pages(llama: TinyModel) -> None:
    """Five of them need fifteen pages, and there are six."""
    prompts = [[(13 * number + step) % 90 + 3 for step in range(60)] for number in range(5)]
    page_bytes = 64 * 4 * sum(layer.values_per_token for layer in llama.loaded.layers)
    limits = EngineSettings(max_length=140, kv_cache_bytes=6 * page_bytes)
    engine = RowEngine(llama.backends, limits)
    verifier = Verifier(engine, ())
    engine.start()

    async def completed(prompt: list[int]) -> list[int]:
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

    try:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(completed, prompts))
        assert found == [plain_greedy(llama.reference, prompt, 80) for prompt in prompts]
        assert engine.usage.preemption_count > 0
        assert engine.usage.led_step_count == 5 * 79
        assert engine.usage.wasted_step_count == 0
    finally:
        await engine.close()
