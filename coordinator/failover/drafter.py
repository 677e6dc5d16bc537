"""Proposes with whichever draft is available. A failing draft costs the speed-up, never the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coordinator.decoding.completion import Completion
from coordinator.failover.placement import DraftLosses, DraftPlace, bound_elsewhere
from coordinator.failover.served_request import ServedRequest
from coordinator.replicas.pool import Member, Pool
from coordinator.speculation import report as speculation_report
from coordinator.speculation.request import RequestSpeculation
from coordinator.speculation.round_timings import RoundTimings
from coordinator.telemetry.observer import EventValue, RequestObserver
from coordinator.transport.draft_client import DraftClient, DraftLimits, DraftSequence
from tandem.errors import CapacityError, ServiceUnavailableError, TandemError
from tandem.replica import ReplicaState
from tandem.speculation_state import SpeculationState
from tandem.types import DraftOptions, Proposal

logger = logging.getLogger(__name__)

_MAX_UNREAD = 32
"""A draft that lacks more tokens than this reads them while the target goes on alone for a round."""
_ABANDON_SECONDS = 1.0
"""A request abandons a draft that is late by more than this if another is ready. It stays with one that never answered:
leaving would lose its place in that draft's queue."""
_DEPTH_PATIENCE = 1.5
"""Times the expected time until the continuation of an outcome is long enough that a round waits for it."""
_MIN_DEPTH_SECONDS = 0.001
"""It waits so much longer still: an arrival is not told more exactly than the event loop wakes up."""


class FailoverDrafter:
    """Asks one draft for proposals for as long as it lives, then another one, which receives all tokens again.

    A round never waits until a draft is found or has read the sequence. Proposals change the speed of a completion and
    not its text, so any round can do without.
    """

    def __init__(
        self,
        pool: Pool[DraftClient],
        options: DraftOptions,
        limits: DraftLimits,
        active: ServedRequest,
        observer: RequestObserver,
        timings: RoundTimings,
        speculation: RequestSpeculation,
        load: Callable[[], int],
    ) -> None:
        """
        Args:
            pool: The drafts.
            options: Sent to each draft when the sequence opens there.
            limits: Bounds of its proposals.
            active: The request, which records its draft's address.
            observer: Observes the request.
            timings: Timings of the request's rounds, shared with the verifier.
            speculation: Decides how much to propose.
            load: Counts the sequences that share the request's target.
        """
        self._pool = pool
        self._options = options
        self._limits = limits
        self._active = active
        self._observer = observer
        self._timings = timings
        self._speculation = speculation
        self._load = load
        self._is_paused = False
        self._place: DraftPlace | None = None
        self._is_resuming = False
        self._went_alone = False
        """True if the last outcome that nobody had drafted for left the target alone for a round."""
        self._losses = DraftLosses()

    async def propose(self, completion: Completion) -> Proposal:
        """Tokens that may follow, fewer than the completion has room for; none when no draft has any in time."""
        count = min(self._begin_round(), completion.room - 1)
        if count <= 0:
            self._leave_if_draining()
            return Proposal(completion.length)
        proposal = None
        try:
            place = self._place_to_ask(completion)
            if place is not None:
                proposal = await self._asked(place, completion, count)
        except TandemError as error:
            self._lose(error)
        return Proposal(completion.length) if proposal is None else proposal

    @property
    def speculation_state(self) -> SpeculationState:
        """State of speculation for this request now."""
        if self._place is None and (self._losses.are_too_many or self._pool.choose() is None):
            return speculation_report.off(speculation_report.NONE_READY)
        if self._place is not None and self._place.sequence.is_late:
            return speculation_report.late(self._place.sequence.late_seconds, self._timings.patience_seconds)
        return speculation_report.decided(self._speculation)

    async def finish(self) -> None:
        """End the sequence; the service frees it at once."""
        if self._place is not None:
            await self._place.sequence.finish()

    def release(self) -> None:
        """Leave the draft between two rounds. The next round sends all tokens to a draft and waits for its proposal."""
        self._is_resuming = self._is_resuming or self._place is not None
        self._leave()

    def cancel(self) -> None:
        """Drop the stream, whatever the draft is doing."""
        self._leave()
        self._speculation.end()

    def _place_to_ask(self, completion: Completion) -> DraftPlace | None:
        """The draft to ask in this round; None where there is none, or where it begins to read the sequence."""
        self._leave_for_better()
        if self._is_resuming:
            # In the very round in which a draft is entered again: under some rules the text depends on the proposals,
            # and it must not depend on how a client reads.
            self._is_resuming = False
            return self._enter(completion)
        if self._place is not None:
            return self._place
        entered = None if self._is_too_late(completion) else self._enter(completion)
        return entered if entered is not None and entered.member.is_bound else None

    async def _asked(self, place: DraftPlace, completion: Completion, count: int) -> Proposal | None:
        sequence, budget = place.sequence, self._speculation.ahead_budget
        is_miss = False
        if sequence.awaits_outcome(completion):
            await self._wait_for_more(sequence, completion, count)
            drafted = self._drafted_ahead(place, completion, count)
            if drafted is not None:
                sequence.go_on(completion, drafted, budget)
                self._went_alone = False
                self._answered(place)
                return drafted
            is_miss = True
            # Never twice: a draft that has nothing ready after a round of the target alone must be asked.
            if not (self._limits.keeps_proposals or self._went_alone):
                count = self._speculation.tokens_after_miss(count)
            self._went_alone = count == 0
            if count == 0:
                # The target goes on alone, and the draft works ahead of that.
                alone = Proposal(completion.length)
                sequence.go_on(completion, alone, budget)
                return alone
        if sequence.unread(completion) > _MAX_UNREAD:
            sequence.read(completion)
            return None
        return await self._requested(place, completion, count, is_miss=is_miss)

    async def _requested(
        self, place: DraftPlace, completion: Completion, count: int, *, is_miss: bool
    ) -> Proposal | None:
        """The answer of the draft, if it comes in time."""
        sequence, budget = place.sequence, self._speculation.ahead_budget
        was_idle, was_late = sequence.is_idle, sequence.is_late
        began = time.monotonic()
        proposal = await sequence.propose(completion, count, self._timings.patience_seconds, budget)
        seconds = time.monotonic() - began
        if proposal is None:
            if not was_late:
                self._timings.was_late()
                self._report("draft_late", place, {"waited_seconds": seconds})
            return None
        if was_idle:
            # A step that waited for an earlier one says nothing about the time of steps.
            self._timings.drafted(seconds, proposal.cost)
            place.member.step.add(seconds)
            if is_miss:
                self._speculation.asked_after_miss(len(proposal), seconds)
        self._answered(place)
        return proposal

    async def _wait_for_more(self, sequence: DraftSequence, completion: Completion, count: int) -> None:
        """Wait for the draft to go on with the continuation of the outcome that came, as far as that pays."""
        unfinished = sequence.unfinished(completion)
        if unfinished is None:
            return
        ready, max_tokens, due_seconds, step_seconds = unfinished
        if self._limits.keeps_proposals:
            # A shorter one is of no use, and to ask anew takes longer than to wait for the rest.
            tokens = count if count <= max_tokens else ready
        else:
            tokens = self._speculation.tokens_after_hit(unfinished, count)
        if tokens > ready:
            expected_seconds = due_seconds + (tokens - ready - 1) * step_seconds
            await sequence.reach_depth(
                completion, tokens, _DEPTH_PATIENCE * expected_seconds + _MIN_DEPTH_SECONDS
            )

    def _drafted_ahead(self, place: DraftPlace, completion: Completion, count: int) -> Proposal | None:
        """The proposal of this round, if the draft made it while the target verified the last one."""
        sequence, ahead = place.sequence, self._speculation.ahead
        for branch_count, seconds in sequence.take_branch_steps():
            ahead.stepped(branch_count, seconds)
        drafted = sequence.drafted_ahead(completion)
        ahead.came(drafted.outcome_rank if drafted else None)
        if drafted is not None and self._limits.keeps_proposals and len(drafted) < count:
            drafted = None  # how far the draft got is a matter of time, and the text must not be
        self._timings.drafted_ahead(drafted)
        return None if drafted is None else drafted.cut(count)

    def _answered(self, place: DraftPlace) -> None:
        """The draft has done its part of the round."""
        if place.is_resumption:
            place.is_resumption = False
            self._report("draft_resumed", place)
        self._losses.add_round()
        self._timings.is_drafted = True

    def _is_too_late(self, completion: Completion) -> bool:
        """True if it ends too soon for a draft that reads in one round and proposes in the next; a bound one does both
        at once."""
        if not completion.has_begun or completion.room > 2 * (self._limits.num_speculative_tokens + 1):
            return False
        member = self._pool.choose(self._avoided)
        return member is None or not member.is_bound

    def _enter(self, completion: Completion) -> DraftPlace | None:
        """Begin on the least busy draft, if there is one. It reads the sequence while the target works."""
        member = None if self._losses.are_too_many else self._pool.choose(self._avoided)
        if member is None:
            return None
        observer = self._observer.stream("draft", member.address)
        sequence = member.client.sequence(self._options, self._limits, observer)
        member.open_sequences += 1
        self._active.draft_address = member.address
        self._place = DraftPlace(member, sequence, is_resumption=bool(self._losses.retry_at))
        sequence.begin(completion)
        return self._place

    @property
    def _avoided(self) -> set[Member[DraftClient]]:
        return self._losses.avoided | bound_elsewhere(self._pool.members, self._active.target_address)

    def _leave(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None
            self._active.draft_address = None

    def _leave_for_better(self) -> None:
        """Leave a draft that drains or hangs if another can take over, and a bound one whose target was left."""
        place = self._place
        if place is None:
            return
        hangs = place.sequence.is_open and place.sequence.late_seconds > _ABANDON_SECONDS
        has_moved = not place.member.goes_with(self._active.target_address)
        is_good = place.member.is_ready and not hangs
        if not has_moved and (is_good or not self._pool.choose({place.member, *self._avoided})):
            return
        if hangs:
            self._lose(ServiceUnavailableError(f"it has been late for {place.sequence.late_seconds:.1f} s"))
        else:
            self._leave()

    def _leave_if_draining(self) -> None:
        """Leave a draining draft in rounds without a proposal; other drafts keep the sequence that they have read."""
        if self._place is not None and self._place.member.state is ReplicaState.DRAINING:
            self._leave()

    def _lose(self, error: TandemError) -> None:
        place = self._place
        assert place is not None, "only a draft that was entered can be lost"
        if isinstance(error, ServiceUnavailableError) and not place.sequence.is_late:
            place.member.suspect(str(error))
        self._losses.add(place.member, is_fault=not isinstance(error, CapacityError))
        self._report("draft_lost", place, {"reason": str(error)})
        self._leave()

    def _begin_round(self) -> int:
        """Ask the controller how many tokens the round is to propose."""
        speculation, load = self._speculation, max(self._load(), 1)
        self._timings.load = load
        speculation.target = self._active.target_address or speculation.target
        tokens = speculation.begin_round(load)
        is_paused = not tokens and not speculation.is_trial
        if is_paused and not self._is_paused and self._place is not None:
            self._report("draft_paused", self._place, {"load": load, "gain": speculation.decision.gain})
        self._is_paused = is_paused
        return tokens

    def _report(self, name: str, place: DraftPlace, more: dict[str, EventValue] | None = None) -> None:
        details: dict[str, EventValue] = {"address": place.member.address, **(more or {})}
        severity = logging.WARNING if name == "draft_lost" else logging.INFO
        message = name.replace("_", " ")
        logger.log(severity, message, extra={"request_id": self._options.request_id, **details})
        self._observer.event(name, details)
