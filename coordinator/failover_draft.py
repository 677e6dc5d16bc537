"""Proposes with whichever draft is there, and pays: whatever goes wrong costs the speed-up, never the request."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from coordinator.completion import Completion
from coordinator.draft_client import DraftClient, DraftLimits, DraftSequence
from coordinator.observer import EventValue, RequestObserver
from coordinator.pace import Pace
from coordinator.payoff import Payoff, RoundCost
from coordinator.pool import Pool
from coordinator.pool_member import Member
from coordinator.replica import ReplicaState
from coordinator.requests import ActiveRequest
from coordinator.round_account import RoundAccount
from tandem.errors import CapacityError, ServiceUnavailableError, TandemError
from tandem.types import DraftOptions, Proposal

logger = logging.getLogger(__name__)

MOST_FAULTS = 8
"""A request that loses as many drafts goes on without."""
_FORGIVEN_ROUNDS = 32
"""After as many proposals the losses before them count no more."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
"""A draft that failed a request is left alone by it for a while, longer each time."""
_MOST_DOUBLINGS = 6
_ABANDON_SECONDS = 1.0
"""A draft that is late for longer is given up where there is another, unless it has yet to begin: then it may be full,
or have much to read, and whoever left would lose its place among those that wait."""


@dataclass(slots=True, eq=False)
class _Place:
    """A sequence and the draft that it is on."""

    member: Member[DraftClient]
    sequence: DraftSequence
    is_resumption: bool
    """Whether another place was lost before."""

    def leave(self) -> None:
        self.sequence.cancel()
        self.member.open_sequences -= 1


@dataclass(slots=True)
class _Losses:
    """What a request has been through with its drafts."""

    count: int = 0
    faults: int = 0
    """Of these, those that were more than a lack of room."""
    rounds_since: int = 0
    retry_at: dict[Member[DraftClient], float] = field(default_factory=dict)

    @property
    def are_too_many(self) -> bool:
        return self.faults >= MOST_FAULTS

    def add(self, member: Member[DraftClient], *, is_fault: bool) -> None:
        wait = min(_FIRST_RETRY_SECONDS * 2 ** min(self.count, _MOST_DOUBLINGS), _LAST_RETRY_SECONDS)
        self.retry_at[member] = time.monotonic() + wait
        self.count += 1
        self.faults += is_fault
        self.rounds_since = 0

    def add_round(self) -> None:
        self.rounds_since += 1
        if self.rounds_since >= _FORGIVEN_ROUNDS:
            self.count = self.faults = 0

    @property
    def avoided(self) -> set[Member[DraftClient]]:
        now = time.monotonic()
        return {member for member, moment in self.retry_at.items() if now < moment}


class FailoverDrafter:
    """Asks one draft for proposals for as long as it lives, then another, with all tokens again.

    A round never waits for a draft to be found or to read the sequence. Proposals change how fast a completion comes
    and not what it is, so a round may always do without.
    """

    def __init__(
        self,
        pool: Pool[DraftClient],
        options: DraftOptions,
        limits: DraftLimits,
        active: ActiveRequest,
        observer: RequestObserver,
        pace: Pace,
        payoff: Payoff,
    ) -> None:
        self._pool = pool
        self._options = options
        self._limits = limits
        self._active = active
        self._observer = observer
        self._pace = pace
        self._payoff = payoff
        self._place: _Place | None = None
        self._losses = _Losses()
        self._account = RoundAccount()
        self._asked_seconds: float | None = None
        self._round_began = time.monotonic()

    async def propose(self, completion: Completion) -> Proposal:
        """Tokens that may follow, fewer than the completion has room for; none when no draft has any in time."""
        self._weigh(self._account.settle() or 0)
        count = min(self._payoff.tokens(self._limits.num_speculative_tokens), completion.room - 1)
        if count <= 0:
            self._leave_what_drains()
            return Proposal(completion.length)
        proposal = await self._proposed(completion, count)
        return Proposal(completion.length) if proposal is None else proposal

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._place is not None:
            await self._place.sequence.finish()

    def cancel(self) -> None:
        """Drop the stream, whatever it is doing."""
        self._account.settle()
        self._leave()
        self._payoff.end()

    async def _proposed(self, completion: Completion, count: int) -> Proposal | None:
        try:
            self._leave_for_better()
            if self._place is None:
                if not self._is_near_the_end(completion):
                    self._enter(completion)
                return None
            return await self._asked(self._place, completion, count)
        except TandemError as error:
            self._lose(error)
            return None

    async def _asked(self, place: _Place, completion: Completion, count: int) -> Proposal | None:
        sequence = place.sequence
        was_idle, was_late = sequence.is_idle, sequence.is_late
        began = time.monotonic()
        proposal = await sequence.propose(completion, count, self._pace.patience_seconds)
        seconds = time.monotonic() - began
        if was_idle:
            # What had to be waited for before the step began says nothing about steps.
            self._asked_seconds = seconds
        if proposal is None:
            if not was_late:
                self._tell("draft_late", place, {"waited_seconds": seconds})
            return None
        if was_idle:
            self._pace.proposing.add(seconds)
            place.member.step.add(seconds)
        if place.is_resumption:
            place.is_resumption = False
            self._tell("draft_resumed", place)
        self._losses.add_round()
        self._account.begin(completion, place.member.figures, len(proposal))
        return proposal

    def _is_near_the_end(self, completion: Completion) -> bool:
        """Whether too little is left for a draft to read all there is: the round in which it reads, and another."""
        return completion.has_begun and completion.room <= 2 * (self._limits.num_speculative_tokens + 1)

    def _enter(self, completion: Completion) -> None:
        """Begin on the draft with the least to do, if there is one. It reads the sequence while the target works."""
        member = None if self._losses.are_too_many else self._pool.choose(self._losses.avoided)
        if member is None:
            return
        watch = self._observer.stream("draft", member.address)
        sequence = member.client.sequence(self._options, self._limits, watch)
        member.open_sequences += 1
        self._active.draft_address = member.address
        self._place = _Place(member, sequence, is_resumption=bool(self._losses.retry_at))
        sequence.begin(completion)

    def _leave(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None
            self._active.draft_address = None

    def _leave_for_better(self) -> None:
        """Leave a draft that drains or hangs, where another can take over."""
        place = self._place
        if place is None:
            return
        hangs = place.sequence.is_open and place.sequence.late_seconds > _ABANDON_SECONDS
        if (place.member.is_ready and not hangs) or not self._pool.choose(
            {place.member, *self._losses.avoided}
        ):
            return
        if hangs:
            self._lose(ServiceUnavailableError(f"it has been late for {place.sequence.late_seconds:.1f} s"))
        else:
            self._leave()

    def _leave_what_drains(self) -> None:
        """While nothing is proposed, a place is kept for what the draft has read; one that ends is not worth that."""
        if self._place is not None and self._place.member.state is ReplicaState.DRAINING:
            self._leave()

    def _lose(self, error: TandemError) -> None:
        place = self._place
        assert place is not None, "without a place nothing is lost"
        if isinstance(error, ServiceUnavailableError) and not place.sequence.is_late:
            place.member.suspect(str(error))
        self._losses.add(place.member, is_fault=not isinstance(error, CapacityError))
        self._tell("draft_lost", place, {"reason": str(error)})
        self._leave()

    def _weigh(self, accepted: int) -> None:
        """Whether the round that has ended was worth its draft."""
        began, self._round_began = self._round_began, time.monotonic()
        asked_seconds, self._asked_seconds = self._asked_seconds, None
        if not self._pace.take_step():
            return
        cost = RoundCost(
            was_asked=asked_seconds is not None,
            accepted=accepted,
            proposing_seconds=asked_seconds or 0.0,
            seconds=self._round_began - began,
        )
        if self._payoff.add(cost) and self._place is not None:
            self._tell("draft_paused", self._place, {"rounds": self._payoff.pause_rounds})

    def _tell(self, name: str, place: _Place, more: dict[str, EventValue] | None = None) -> None:
        details: dict[str, EventValue] = {"address": place.member.address, **(more or {})}
        severity = logging.WARNING if name == "draft_lost" else logging.INFO
        words = name.replace("_", " ")
        logger.log(severity, words, extra={"request_id": self._options.request_id, **details})
        self._observer.event(name, details)
