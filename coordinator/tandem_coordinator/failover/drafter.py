"""Proposes with whichever draft is available. A failing draft costs the speed-up, never the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tandem.errors import TandemError
from tandem.model.replica import ReplicaState
from tandem.model.speculation_state import SpeculationState
from tandem.model.types import MAX_AHEAD_TOKENS, DraftOptions, Proposal
from tandem.scopes import RequestScopes
from tandem_coordinator import speculation_report
from tandem_coordinator.controller import RequestController, Unfinished
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.decoding.rounds import RequestRounds
from tandem_coordinator.failover.placement import DraftPlacement
from tandem_coordinator.failover.verifier import FailoverVerifier
from tandem_coordinator.replicas.pool import Member, Pool
from tandem_coordinator.stats.rounds import RoundResult
from tandem_coordinator.telemetry.observer import EventValue, RequestObserver
from tandem_coordinator.transport.draft_client import DraftClient, DraftLimits, DraftSequence

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class FailoverDrafter:
    """Asks one draft for proposals for as long as it lives, then another one, which receives all tokens again.

    A round never waits until a draft is found or has read the sequence. Proposals change the speed of a completion and
    not its text, so any round can do without.
    """

    _pool: Pool[DraftClient]
    _options: DraftOptions
    _scopes: RequestScopes
    _limits: DraftLimits
    _rounds: RequestRounds
    _observer: RequestObserver
    _controller: RequestController
    _load: Callable[[], int]
    _lead: int = 0
    """How many rounds the target may begin by itself."""
    _target: FailoverVerifier | None = None
    """None: it may begin none with a proposal."""
    _is_paused: bool = False
    _is_too_long: bool = False
    _is_resuming: bool = False
    """True after `release`, until the next round that asks a draft."""
    _has_lost: bool = False
    """True from the loss of a draft until the next proposal."""
    _went_alone: bool = False
    """True if the last outcome that nobody had drafted for left the target alone for a round."""
    _placement: DraftPlacement = field(init=False)

    def __post_init__(self) -> None:
        self._placement = DraftPlacement(
            self._pool,
            self._options,
            self._scopes,
            self._limits,
            self._lost,
            lambda address: self._observer.stream("draft", address),
            self._target.expect if self._target is not None and self._lead else None,
        )

    async def propose(self, completion: Completion) -> Proposal:
        placement = self._placement
        count = min(self._begin_round(), completion.room - 1)
        if self._limits.max_length is not None:
            count = min(count, self._limits.max_length - completion.length)
            self._is_too_long = completion.length >= self._limits.max_length
        has_begun = self._target is not None and self._target.begun_proposed is not None
        forced = None if has_begun else completion.forced()
        if forced is not None and len(forced) >= count:
            return self._jumped(completion, forced)
        proposal = None
        try:
            if self._is_too_long:
                self._leave()
            elif count <= 0:
                self._leave_if_draining()
            elif (sequence := self._sequence_to_ask(completion)) is not None:
                proposal = await self._asked(sequence, completion, count, forced)
        except TandemError as error:
            placement.lose(error)
            self._sequence_to_ask(completion)  # the next draft reads while the target goes on alone
        finally:
            self._rounds.draft_address = placement.address
        if forced is not None and not proposal:
            return self._jumped(completion, forced)
        if proposal is None:
            return Proposal(completion.length, lead=self._lead if self._is_paused or self._is_too_long else 0)
        return proposal

    def _jumped(self, completion: Completion, forced: Proposal) -> Proposal:
        """Propose what the grammar forces; a draft that works ahead does so behind it."""
        current = self._placement.current
        if current is not None and current.sequence.outcomes.awaits(completion.token_ids):
            current.sequence.go_on(completion, forced, self._controller.plan.ahead_budget)
        return forced

    @property
    def speculation_state(self) -> SpeculationState:
        current = self._placement.current
        if self._is_too_long:
            return speculation_report.off(speculation_report.TOO_LONG)
        if current is None and self._placement.goes_without:
            return speculation_report.off(speculation_report.NONE_READY)
        if current is not None and current.sequence.is_late:
            return speculation_report.late(current.sequence.late_seconds, self._rounds.patience_seconds)
        return speculation_report.decided(self._controller)

    def end_round(self, result: RoundResult) -> None:
        self._controller.end_round(result)

    async def finish(self) -> None:
        await self._placement.finish()

    def release(self) -> None:
        """Leave the draft between two rounds. The next round sends all tokens to a draft and waits for its proposal."""
        self._is_resuming = self._is_resuming or self._placement.current is not None
        self._leave()

    def cancel(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._placement.leave()
        self._rounds.draft_address = None

    def _begin_round(self) -> int:
        controller, load = self._controller, max(self._load(), 1)
        self._rounds.load = load
        self._placement.target_address = self._rounds.target_address
        tokens = controller.begin_round(load, self._rounds.target_address).tokens
        is_paused = not tokens
        if is_paused and not self._is_paused and (address := self._placement.address):
            self._report("draft_paused", address, {"load": load, "gain": controller.gain})
        self._is_paused = is_paused
        return tokens

    def _leave_if_draining(self) -> None:
        """Leave a draining draft in rounds without a proposal; other drafts keep the sequence that they have read."""
        current = self._placement.current
        if current is not None and current.member.state is ReplicaState.DRAINING:
            self._placement.leave()

    def _sequence_to_ask(self, completion: Completion) -> DraftSequence | None:
        """The sequence on the draft to ask in this round; None where there is none, or where it begins to be read."""
        placement = self._placement
        placement.leave_for_better()
        # Asked in the very round in which a draft is entered again: under some rules the text depends on the proposals,
        # and it must not depend on how a client reads.
        is_resuming, self._is_resuming = self._is_resuming, False
        if placement.current is None:
            member = placement.candidate(tokens=completion)
            if member is None:
                return None
            # A bound draft reads and proposes at once; another one reads in this round and proposes in the next.
            is_at_once = member.is_bound or is_resuming
            few = 2 * (self._limits.num_speculative_tokens + 1)
            if not is_at_once and completion.has_begun and completion.room <= few:
                return None  # it ends before the draft has read it
            placement.enter(member, completion)
            if not is_at_once:
                return None
        assert placement.current is not None
        return placement.current.sequence

    async def _asked(
        self, sequence: DraftSequence, completion: Completion, count: int, forced: Proposal | None
    ) -> Proposal | None:
        budget, wanted = self._controller.plan.ahead_budget, count
        begun = None if self._target is None else self._target.begun_proposed
        is_miss = sequence.outcomes.awaits(completion.token_ids)
        if begun == 0 and not is_miss:
            return None  # a step that has begun costs nothing, and this one lets the target begin no other
        if is_miss:
            if begun is None:
                drafted = await self._drafted_ahead(sequence, completion, count)
            else:
                drafted = await self._take_drafted_ahead(sequence, completion, begun)
            if drafted is not None:
                sequence.go_on(completion, drafted, budget)
                self._went_alone = False
                self._proposed()
                return self._leading(sequence, drafted, wanted)
            # Never twice: a draft that has nothing ready after a round of the target alone must be asked.
            if begun is not None:
                count = 0
            elif not (self._limits.keeps_proposals or self._went_alone):
                count = self._controller.tokens_after_miss(count)
            self._went_alone = count == 0
            if count == 0:
                # The target goes on alone, or with forced tokens, and the draft works ahead of that.
                alone = forced or Proposal(completion.length)
                sequence.go_on(completion, alone, budget)
                return self._leading(sequence, alone, wanted)
        if self._placement.must_read(completion):
            return None
        requested = await self._requested(sequence, completion, count, is_miss=is_miss)
        if requested is None:
            return None
        return self._leading(sequence, completion.possible(requested), wanted)

    def _leading(self, sequence: DraftSequence, proposal: Proposal, count: int) -> Proposal:
        """Let the target begin the next rounds by itself, if the draft makes their proposals ahead."""
        if self._target is None or not self._lead or not sequence.outcomes.is_granted:
            return proposal
        may_go_alone = not self._went_alone and self._controller.tokens_after_miss(count) == 0
        # With a whole proposal or not unasked: in the time that a question takes, a late draft makes more than a round
        # gains that begins early with less.
        fewest = min(count, MAX_AHEAD_TOKENS)
        return replace(proposal, lead=self._lead, min_proposed=fewest, alone_after_miss=may_go_alone)

    async def _take_drafted_ahead(
        self, sequence: DraftSequence, completion: Completion, count: int
    ) -> Proposal | None:
        """The proposal of so many tokens with which the target has begun this round; None where it has begun alone."""
        drafted = await sequence.drafted_ahead(completion)
        drafted = None if drafted is None or not count else drafted.cut(count)
        self._rounds.drafted_ahead(drafted, sequence.outcomes.step_cost)
        return drafted

    async def _requested(
        self, sequence: DraftSequence, completion: Completion, count: int, *, is_miss: bool
    ) -> Proposal | None:
        was_late, began = sequence.is_late, time.monotonic()
        proposal, step_seconds = await self._placement.asked(
            completion, count, self._rounds.patience_seconds, self._controller.plan.ahead_budget
        )
        if proposal is None:
            if not was_late:
                self._rounds.round.was_late = True
                self._report(
                    "draft_late", self._placement.address, {"waited_seconds": time.monotonic() - began}
                )
            return None
        if step_seconds is not None:
            self._rounds.drafted(step_seconds, proposal.cost)
        self._proposed()
        return proposal

    async def _drafted_ahead(
        self, sequence: DraftSequence, completion: Completion, count: int
    ) -> Proposal | None:
        """The proposal of this round, if the draft made it while the target verified the last one."""
        keeps_proposals = self._limits.keeps_proposals

        def wanted(unfinished: Unfinished) -> int:
            if keeps_proposals:
                # A shorter one is of no use, and to ask anew takes longer than to wait for the rest.
                return count if count <= unfinished.max_tokens else unfinished.ready
            return self._controller.tokens_after_hit(unfinished, count)

        drafted = await sequence.drafted_ahead(completion, wanted)
        if drafted is not None and keeps_proposals and len(drafted) < count:
            drafted = None  # how far the draft got is a matter of time, and the text must not be
        self._rounds.drafted_ahead(drafted)
        return None if drafted is None else drafted.cut(count)

    def _proposed(self) -> None:
        if self._has_lost:
            self._has_lost = False
            self._report("draft_resumed", self._placement.address)
        self._placement.count_proposal()
        self._rounds.round.is_drafted = True

    def _lost(self, member: Member[DraftClient], error: TandemError) -> None:
        self._has_lost = True
        self._report("draft_lost", member.address, {"reason": str(error)})

    def _report(self, name: str, address: str | None, more: dict[str, EventValue] | None = None) -> None:
        details: dict[str, EventValue] = {"address": address or "", **(more or {})}
        severity = logging.WARNING if name == "draft_lost" else logging.INFO
        message = name.replace("_", " ")
        logger.log(severity, message, extra={"request_id": self._options.request_id, **details})
        self._observer.event(name, details)
