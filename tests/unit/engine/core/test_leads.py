"""Which jobs begin by themselves, and which of them were for nothing."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tandem.engine.core.jobs import Job, StepRecord
from tandem.engine.core.leads import Leads
from tandem.engine.core.row_engine import RowEngine
from tandem.engine.core.scheduler import PageScheduler
from tandem.engine.interface import RowRequest
from tandem.engine.settings import EngineSettings
from tandem.errors import TandemError
from tandem.types import (
    Delta,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from target_service.verifier import Verifier
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import plain_greedy


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


@pytest.mark.parametrize("lead", [1, 2, 8])
def test_as_many_jobs_begin_as_are_allowed(lead: int) -> None:
    led = Led(lead)
    assert [led.answered() for _ in range(lead)] == [True] * lead
    assert led.leads.is_ahead(led.sequence)
    assert not led.answered(), "the last one waits"
    assert led.ended() == led.leads.begun_count == lead


def test_none_begins_without_a_lead() -> None:
    led = Led(0)
    assert not led.answered()
    assert not led.leads.is_ahead(led.sequence)
    assert led.ended() == 0


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


def test_a_question_that_comes_while_its_job_runs_lets_none_begin_before_the_answer() -> None:
    led = Led(2)
    assert led.answered()
    assert not led.asked(1, 2), "nothing follows yet"
    assert led.answered()
    assert led.answered()
    assert not led.answered()
    assert led.ended() == 2


def test_a_sequence_without_a_lead_has_nothing_to_grant_or_to_end() -> None:
    leads, sequence = Leads(), Led(1).sequence
    assert leads.grant(sequence, 1, 2) is None
    assert not leads.end(sequence)
    assert not leads.is_ahead(sequence)


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
