"""The draft of a request, whichever is available. A failing draft costs the speed-up, never the request."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from tandem.errors import TandemError
from tandem.model.replica import ReplicaState
from tandem.model.speculation_state import SpeculationState
from tandem.model.types import DraftOptions, Proposal
from tandem.serving.scopes import RequestScopes
from tandem.wire.features import PassedStates
from tandem_coordinator import speculation_report
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.outcomes import AWAY, Away, Coming, Hit, Outcome
from tandem_coordinator.replicas.pool import Member, Pool
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.placement import DraftPlacement
from tandem_coordinator.rounds.question import Asked, Late
from tandem_coordinator.stats.rounds import RoundEnded, RoundPlan
from tandem_coordinator.stats.speculation import MovingAverage
from tandem_coordinator.telemetry.observer import RequestObserver, StreamObserver
from tandem_coordinator.transport.draft_client import DraftClient, DraftLimits, DraftSequence, OnOutcomes

_VERIFICATIONS = 4.0
"""A request stops waiting for its draft after its usual time and so many verifications."""
_MIN_SECONDS = 0.25
"""Shorter waits would take a pause of the machine for a lost draft."""
_MAX_SECONDS = 0.8
"""A draft that hangs stops a stream once, for less than a second."""


class Patience:
    """Knows how long a request waits for a proposal: its usual time and a few verifications."""

    def __init__(self, fixed_seconds: float | None = None) -> None:
        self.proposing = MovingAverage()
        """Seconds in which the draft proposes."""
        self._fixed_seconds = fixed_seconds
        self._verifying = MovingAverage()
        """Seconds to verify a proposal that is not empty."""
        self._extending = MovingAverage()
        """Seconds to verify an empty proposal: the target alone."""
        self._reading: float | None = None

    def round_ended(self, ended: RoundEnded) -> None:
        seconds = ended.times.verified - ended.times.proposed
        if ended.has_read:
            self._reading = seconds
        elif ended.proposed:
            self._verifying.add(seconds)
        else:
            self._extending.add(seconds)
        if ended.asked_seconds is not None:
            self.proposing.add(ended.asked_seconds)

    @property
    def seconds(self) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        verification = self._verifying.value or self._extending.value or self._reading or 0.0
        usual = self.proposing.value or 0.0
        return min(max(usual + _VERIFICATIONS * verification, _MIN_SECONDS), _MAX_SECONDS)


@dataclass(slots=True, eq=False)
class FailoverDraft:
    """One draft for as long as it lives, then another one, which receives all tokens again.

    A round never waits until a draft is found or has read the sequence. Proposals change the speed of a completion and
    not its text, so any round can do without.
    """

    _pool: Pool[DraftClient]
    _options: DraftOptions
    _scopes: RequestScopes
    _limits: DraftLimits
    _patience: Patience
    _events: RequestEvents
    _observer: RequestObserver
    _on_outcomes: OnOutcomes = None
    """Takes what the draft pushes of the round in progress."""
    _is_resting: bool = False
    _is_too_long: bool = False
    _is_resuming: bool = False
    """True after `release`, until the next round that asks a draft."""
    _has_lost: bool = False
    """True from the loss of a draft until the next proposal."""
    _placement: DraftPlacement = field(init=False)

    def __post_init__(self) -> None:
        self._placement = DraftPlacement(
            self._pool,
            self._options,
            self._scopes,
            self._limits,
            self._lost,
            self._observe,
            self._on_outcomes,
        )

    # ---- what a round asks

    @property
    def address(self) -> str | None:
        return self._placement.address

    @property
    def is_ahead(self) -> bool:
        current = self._placement.current
        return current is not None and current.sequence.outcomes.is_granted

    @property
    def usual_seconds(self) -> float:
        return self._patience.proposing.value or 0.0

    def limit(self, completion: Completion, tokens: int) -> int:
        most = self._limits.max_length
        if most is None:
            return tokens
        self._is_too_long = completion.length >= most
        return min(tokens, most - completion.length)

    def rest(self, completion: Completion, plan: RoundPlan) -> None:
        """Leave a draining draft, and any where the text is too long for it; otherwise keep what the draft has read."""
        address = self.address
        if not plan.tokens and not self._is_resting and address is not None:
            self._events.replica_changed(
                "draft_paused", "draft paused", address=address, load=plan.load, gain=plan.predicted_gain
            )
        self._is_resting = not plan.tokens
        current = self._placement.current
        if current is None:
            return
        if self._is_too_long or current.member.state is ReplicaState.DRAINING:
            self._placement.leave()

    def outcome(self, completion: Completion) -> Outcome | Away:
        self._is_resting = False
        try:
            sequence = self._sequence_to_ask(completion)
            if sequence is None:
                return AWAY
            found = sequence.outcome(completion)
        except TandemError as error:
            return self._go_elsewhere(completion, error)
        if isinstance(found, Hit | Coming):
            self._has_proposed()
        return found

    async def wait_for(self, completion: Completion, coming: Coming, tokens: int) -> Proposal | None:
        current = self._placement.current
        if tokens <= coming.ready or current is None:
            return coming.proposal
        try:
            return await current.sequence.rest(completion, coming, tokens)
        except TandemError as error:
            self._go_elsewhere(completion, error)
            return None

    async def ask(self, completion: Completion, tokens: int, plan: RoundPlan) -> Asked | Late | None:
        current = self._placement.current
        if current is None or self._placement.must_read(completion):
            return None
        was_late = current.sequence.is_late
        began = time.monotonic()
        try:
            proposal, seconds = await self._placement.asked(
                completion, tokens, self._patience.seconds, plan.ahead_budget
            )
        except TandemError as error:
            self._go_elsewhere(completion, error)
            return None
        if proposal is not None:
            self._has_proposed()
            return Asked(proposal, seconds)
        if was_late:
            return None  # this round did not wait for it
        self._events.replica_changed(
            "draft_late", "draft late", address=self.address or "", waited_seconds=time.monotonic() - began
        )
        return Late()

    def draft_ahead_of(self, completion: Completion, proposal: Proposal, plan: RoundPlan) -> None:
        current = self._placement.current
        if current is not None and current.sequence.outcomes.awaits(completion.token_ids):
            current.sequence.go_on(completion, proposal, plan.ahead_budget)

    def take_states(self, states: PassedStates) -> None:
        """Take hidden states of the target, which whichever draft there is gets."""
        if self._placement.current is not None:
            self._placement.current.sequence.take_states(states)

    # ---- what becomes of it

    @property
    def trouble(self) -> SpeculationState | None:
        """Why it proposes nothing at the moment; None where nothing is wrong with it."""
        current = self._placement.current
        if self._is_too_long:
            return speculation_report.off(speculation_report.TOO_LONG)
        if current is None and self._placement.goes_without:
            return speculation_report.off(speculation_report.NONE_READY)
        if current is not None and current.sequence.is_late:
            return speculation_report.late(current.sequence.late_seconds, self._patience.seconds)
        return None

    async def finish(self) -> None:
        await self._placement.finish()

    def release(self) -> None:
        """Leave the draft between two rounds. The next round sends all tokens to a draft and waits for its proposal."""
        self._is_resuming = self._is_resuming or self._placement.current is not None
        self._placement.leave()

    def cancel(self) -> None:
        self._placement.leave()

    def _sequence_to_ask(self, completion: Completion) -> DraftSequence | None:
        """The sequence on the draft to ask in this round; None where there is none, or where it begins to be read."""
        placement = self._placement
        placement.leave_for_better()
        # Asked in the very round in which a draft is entered again: under some rules the text depends on the proposals,
        # and it must not depend on how a client reads.
        is_resuming = self._is_resuming
        self._is_resuming = False
        if (current := placement.current) is not None:
            return current.sequence
        member = placement.candidate(tokens=completion)
        if member is None:
            return None
        few = 2 * (self._limits.num_speculative_tokens + 1)
        if not is_resuming and completion.has_begun and completion.room <= few:
            return None  # it ends before the draft has read it
        sequence = placement.enter(member, completion)
        # It reads in this round and proposes in the next.
        return sequence if is_resuming else None

    def _go_elsewhere(self, completion: Completion, error: TandemError) -> Away:
        """Lose the draft, and let the next one read while the target goes on alone."""
        self._placement.lose(error)
        self._sequence_to_ask(completion)
        return AWAY

    def _has_proposed(self) -> None:
        self._placement.count_proposal()
        if self._has_lost:
            self._has_lost = False
            self._events.replica_changed("draft_resumed", "draft resumed", address=self.address or "")

    def _lost(self, member: Member[DraftClient], error: TandemError) -> None:
        self._has_lost = True
        self._events.replica_changed(
            "draft_lost", "draft lost", logging.WARNING, address=member.address, reason=str(error)
        )

    def _observe(self, address: str) -> StreamObserver:
        return self._observer.stream("draft", address)


@dataclass(slots=True, eq=False)
class NoDraft:
    """The draft of a request that its target serves alone, or with a head of its own."""

    trouble: SpeculationState | None
    """Why nothing is proposed; None where the target's own head proposes."""
    address: str | None = None
    is_ahead: bool = False
    usual_seconds: float = 0.0

    def limit(self, completion: Completion, tokens: int) -> int:
        return 0

    def rest(self, completion: Completion, plan: RoundPlan) -> None:
        """Do nothing, here and below: there is nobody to tell."""

    def outcome(self, completion: Completion) -> Away:
        return AWAY

    async def wait_for(self, completion: Completion, coming: Coming, tokens: int) -> None:
        return None

    async def ask(self, completion: Completion, tokens: int, plan: RoundPlan) -> None:
        return None

    def draft_ahead_of(self, completion: Completion, proposal: Proposal, plan: RoundPlan) -> None: ...

    async def finish(self) -> None: ...

    def release(self) -> None: ...

    def cancel(self) -> None: ...
