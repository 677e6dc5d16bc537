"""Notices verifications whose answers are lost, and targets that accept them and never answer.

An answer that takes long is asked for again. The target then repeats it, or says that the step is pending, or does not
know it: so a lost message costs seconds, whatever the target does for others.

A hung target still answers health checks, so neither the health protocol nor a keepalive ping reveals it. It is noticed
by a bound learnt from how long answers take. Its sequences move to another target, and it gets no new ones until it
answers a probe, which is a small verification.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import Pending
from tandem_coordinator.transport.target_client import ASK_AGAIN_SECONDS

AnswerT = TypeVar("AnswerT")

SILENT_SECONDS = 0.5
"""A target that says nothing of a step that was asked again, but answers what it was asked so much later, does not know
the step. Messages of a connection arrive in order; a busy event loop may read those of two streams in another."""
MIN_SECONDS = 10.0
"""Shorter silences are pauses of a busy machine. To move a sequence, the next target has to read all of its tokens."""
UNLEARNT_SECONDS = 30.0
"""Before the first answer of a step: as long as the engine's own watchdog allows at least."""
UNLEARNT_SECONDS_PER_TOKEN = 1.0
"""Before the first answers: a large model on a slow CPU reads a few tokens per second."""
MARGIN = 8.0
"""Factor on the slowest recent answers."""
_PROMPT_TOKENS = 64
"""More new tokens than this count as a prompt, whose time grows with its length."""


class FadingMaximum:
    """The largest measurement, where a measurement counts for half after a minute."""

    def __init__(self) -> None:
        self.value: float | None = None
        """As of the last measurement: it must not shrink while an answer is awaited. None before the first."""
        self._at = 0.0

    def add(self, measured: float, now: float) -> None:
        if self.value is not None:
            # A slow answer loses half of its weight in a minute
            measured = max(measured, self.value * 0.5 ** ((now - self._at) / 60.0))
        self.value = measured
        self._at = now


class VerificationTimes:
    """Learns the time that verifications take on all targets, and bounds the time that one may take."""

    def __init__(self, fixed_seconds: float | None = None) -> None:
        """Begin without any measurement; with `fixed_seconds` the bound is that, and not learnt."""
        self.fixed_seconds = fixed_seconds
        self._step = FadingMaximum()
        self._prompt_token = FadingMaximum()

    def add(self, token_count: int, seconds: float, now: float) -> None:
        """Count a verification: its new tokens, and the seconds until its answer."""
        if token_count > _PROMPT_TOKENS:
            self._prompt_token.add(seconds / token_count, now)
        else:
            self._step.add(seconds, now)

    def bound_seconds(self, prompt_tokens: int) -> float:
        """Seconds for which a target with so many prompt tokens to read may answer nothing."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        step = self._step.value
        steps_seconds = UNLEARNT_SECONDS if step is None else max(MIN_SECONDS, MARGIN * step)
        rate = self._prompt_token.value
        token_seconds = UNLEARNT_SECONDS_PER_TOKEN if rate is None else MARGIN * rate
        return steps_seconds + token_seconds * prompt_tokens


class AskedSequence(Protocol):
    """A sequence whose target has been asked for a verification."""

    @property
    def pending(self) -> Pending | None:
        """The target's word on the step that was last asked again; None before it has come."""

    @property
    def unwritten(self) -> int:
        """Requests that wait to be written."""

    def ask_again(self) -> None:
        """Ask for the answer that is awaited once more."""

    def fail(self, error: TandemError) -> None:
        """Give up the answer that is awaited, with this error."""


@dataclass(slots=True, eq=False)
class Step:
    """A verification that a target has been asked for and has not answered."""

    token_count: int
    """New tokens."""
    is_first: bool
    """The first of its stream may wait behind the prompts of others."""
    asked_at: float
    sequence: AskedSequence
    asked_again_at: float | None = None
    """None: never, or the target has answered that."""
    ask_again_at: float = 0.0
    is_waiting: bool = False
    """The target says that it waits for room, while others are answered."""
    was_pending: bool = False
    """The target said so when it was asked again: the answer takes long, and is not lost."""

    def listen(self, now: float) -> None:
        """Take the target's word on it."""
        if self.asked_again_at is None:
            return
        if (pending := self.sequence.pending) is not None:
            self.is_waiting = pending.is_waiting
            self.was_pending = True
            self.asked_again_at = None
        elif self.sequence.unwritten:
            self.asked_again_at = now  # it was not asked again yet

    def ask_again(self, now: float) -> None:
        self.sequence.ask_again()
        self.asked_again_at = now
        # Of a step that takes long an answer may be lost after half of that, which a message costs to know
        self.ask_again_at = now + max(ASK_AGAIN_SECONDS, (now - self.asked_at) / 2.0)


class UnansweredSteps:
    """The unanswered verifications of one target. None starts a timer: the registry checks all of them."""

    def __init__(self, times: VerificationTimes, clock: Callable[[], float] = time.monotonic) -> None:
        self._times = times
        self._clock = clock
        self._steps: set[Step] = set()
        self._answered_at = clock()
        self._answered_asked_at = self._answered_at
        """When the latest question was asked that the target has answered."""

    async def wait(
        self,
        answer: Awaitable[AnswerT],
        sequence: AskedSequence,
        token_count: int,
        *,
        is_first: bool,
        until: float | None = None,
    ) -> AnswerT:
        """The answer to a verification of so many new tokens. `give_up` fails the sequence, and so does a moment of the
        event loop's clock."""
        step = self.begin(sequence, token_count, is_first=is_first)
        timer = None
        if until is not None:
            timer = asyncio.get_running_loop().call_at(until, self.give_up, (step,))
        try:
            found = await answer
        finally:
            self._steps.discard(step)
            if timer is not None:
                timer.cancel()
        self.answered(step)
        return found

    def begin(self, sequence: AskedSequence, token_count: int, *, is_first: bool) -> Step:
        now = self._clock()
        step = Step(token_count, is_first, now, sequence)
        step.ask_again_at = now + ASK_AGAIN_SECONDS
        self._steps.add(step)
        return step

    def heard(self, asked_at: float) -> None:
        """The target has answered something that it was asked then, a health check for instance."""
        self._answered_asked_at = max(self._answered_asked_at, asked_at)

    def ask_again(self) -> None:
        """Ask again for the answers that have taken long, each now and then."""
        now = self._clock()
        for step in self._steps:
            step.listen(now)
            if step.asked_again_at is None and now >= step.ask_again_at:
                step.ask_again(now)

    def answered(self, step: Step) -> None:
        self._steps.discard(step)
        now = self._clock()
        seconds = now - step.asked_at
        step.listen(now)
        was_lost = seconds > ASK_AGAIN_SECONDS and not step.was_pending
        if not (was_lost or step.is_waiting):
            self._times.add(step.token_count, seconds, now)
        self._answered_at = now
        self.heard(step.asked_at)

    def lost(self) -> Collection[Step]:
        """The verifications that the target does not know, though it answers other things."""
        return [
            step
            for step in self._steps
            if step.asked_again_at is not None
            and self._answered_asked_at - step.asked_again_at > SILENT_SECONDS
        ]

    def overdue(self, more_seconds: float = 0.0) -> Collection[Step]:
        """The verifications that are late by more than bound and `more_seconds`; all if nothing is answered at all."""
        now = self._clock()
        prompt_tokens = sum(step.token_count for step in self._steps if step.token_count > _PROMPT_TOKENS)
        bound = self._times.bound_seconds(prompt_tokens) + more_seconds
        late = [step for step in self._steps if self._is_late(step, now, bound)]
        return set(self._steps) if late and now - self._answered_at > bound else late

    def _is_late(self, step: Step, now: float, bound: float) -> bool:
        answers_others = self._answered_at > step.asked_at
        may_wait = step.is_first or step.is_waiting
        return now - (self._answered_at if answers_others and may_wait else step.asked_at) > bound

    def give_up(self, steps: Collection[Step]) -> None:
        """End the waits for these."""
        now = self._clock()
        self._steps.difference_update(steps)
        for step in steps:
            seconds = now - step.asked_at
            step.sequence.fail(
                ServiceUnavailableError(f"target service: no answer to a verification within {seconds:.3g} s")
            )
