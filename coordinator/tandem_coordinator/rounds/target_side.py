"""The target of a request, whichever is there. When one fails, the round is asked of another: a client sees a pause and
nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from tandem.errors import (
    AbortedError,
    CapacityError,
    InvalidRequestError,
    PermissionDeniedError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
    plural,
)
from tandem.model.replica import ReplicaState
from tandem.model.types import (
    NO_LEAD,
    CacheCounts,
    DraftedOutcomes,
    Lead,
    LeadStats,
    OwnHead,
    Proposal,
    TargetOptions,
    Verification,
    Weights,
)
from tandem.rpc.channels import Deadline
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.replicas.pool import UNANSWERED_SECONDS, Member, Pool
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.placement import OpenSequence
from tandem_coordinator.telemetry.observer import RequestObserver
from tandem_coordinator.transport.target_client import OnStates, RowChoice, TargetClient, TargetSequence

logger = logging.getLogger(__name__)

_REFUSAL_CHARACTERS = 200
"""Length at which a service's reason for refusing a request is cut."""
SUSPICIOUS_DEATHS = 2
"""A request that so many targets die of in one round may be the cause. It meets no other target that was there when the
first of them died: only one that was started since, as a supervisor starts what has died."""
MAX_LOSSES = 3
"""A request that so many targets die of in one round ends."""
_SUSPECT_POLL_SECONDS = 0.05
"""Interval at which a suspect looks for a target, and whether those that it lost live."""
_MAX_RETRY_SECONDS = 1.0
"""Longest wait before a round is tried again that has lost `MAX_LOSSES` targets, which live."""
MOVE_SECONDS = 5.0
"""Wait of a sequence that moves off a draining target for the new one, which may be full."""


class _Place(OpenSequence[TargetClient, TargetSequence]):
    """A sequence on a target."""

    def __init__(
        self, member: Member[TargetClient], sequence: TargetSequence, weights: Weights | None
    ) -> None:
        super().__init__(member, sequence)
        self.weights = weights
        """Those that compute it; None where the target does not say."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """A target that was lost while it was asked."""

    member: Member[TargetClient]
    instance_id: str
    """Of its process."""
    at: float
    """By the monotonic clock."""

    @property
    def is_death(self) -> bool:
        """True as long as the process has not answered since; then it was its link that broke."""
        return not self.member.has_answered(self.instance_id, self.at)


@dataclass(slots=True, eq=False)
class _Trouble:
    """Failures in the round in progress."""

    delivered: int
    """Tokens of the completion that earlier rounds have delivered."""
    began: float = 0.0
    """Time of the first failure, by the monotonic clock; 0 before it."""
    losses: list[_Loss] = field(default_factory=list)
    """Targets that were lost during a request to them."""
    is_reported: bool = False
    avoided: set[Member[TargetClient]] = field(default_factory=set)
    """Targets that had no room, refused the request or sent invalid answers."""
    doubted: dict[Member[TargetClient], str] = field(default_factory=dict)
    """Those that refused it or sent invalid answers, each with what was wrong. If another one goes on with the same
    round, it is they who have erred."""

    @property
    def seconds(self) -> float:
        """Seconds since the first failure. The time before it does not count, since a prompt may take minutes."""
        return time.monotonic() - self.began if self.began else 0.0

    @property
    def deaths(self) -> list[_Loss]:
        return [loss for loss in self.losses if loss.is_death]

    def end(self) -> TandemError:
        """The error that ends the request. Not UNAVAILABLE: clients would try again and lose the next targets."""
        return TandemError(
            f"{len(self.deaths)} targets were lost over the same tokens of this request, so it is not tried on "
            f"another; {self.sentence}"
        )

    @property
    def is_suspect(self) -> bool:
        """True if the request may be what kills targets."""
        return len(self.deaths) >= SUSPICIOUS_DEATHS

    def shuns(self, member: Member[TargetClient]) -> bool:
        """True for a target that the request must not reach: an avoided one, and for a suspect each that was there when
        it lost the first."""
        deaths = self.deaths
        is_spared = len(deaths) >= SUSPICIOUS_DEATHS and not member.is_newer_than(deaths[0].at)
        return is_spared or member in self.avoided

    @property
    def sentence(self) -> str:
        return f"{plural(self.delivered, 'token')} had been delivered"


@dataclass(slots=True, eq=False)
class FailoverTarget:
    """One target for as long as it lives, then another one, which is asked with all tokens and the same proposal.

    Noise is keyed by seed, position and base length, so the repeated round has the result of the lost one.
    """

    _pool: Pool[TargetClient]
    _options: TargetOptions
    _rows: RowChoice
    _events: RequestEvents
    _observer: RequestObserver
    _deadline: Deadline
    _wait_seconds: float
    has_read: bool = False
    weights: tuple[Weights, ...] = ()
    """Those that have computed rounds of the request, in order; none where targets do not say."""
    _ended_leads: LeadStats = field(default_factory=LeadStats)
    """Rounds that targets began by themselves for sequences that have ended there."""
    _cached_tokens: int | None = None
    """Tokens that the first target had computed before; None until it says so."""
    _ended_preemptions: int = 0
    """Of sequences that have ended on their targets."""
    _place: _Place | None = None
    _left: _Place | None = None
    _next_move: float = 0.0
    on_states: OnStates = None
    """Takes the hidden states that a head apart reads."""

    @property
    def address(self) -> str | None:
        return None if self._place is None else self._place.member.address

    @property
    def has_head(self) -> bool:
        """True if the target, or the one that it is likely to be, drafts by itself."""
        member = self._pool.choose() if self._place is None else self._place.member
        return member is not None and member.has_head

    async def verify(
        self, completion: Completion, asked: Proposal | OwnHead, lead: Lead = NO_LEAD
    ) -> Verification:
        self._leave_if_draining()
        if self._place is None:
            return await self._verify_elsewhere(completion, asked, lead)
        try:
            return await self._ask(self._place, completion, asked, lead)
        except TandemError as error:
            return await self._verify_elsewhere(completion, asked, lead, error)

    async def _verify_elsewhere(
        self,
        completion: Completion,
        asked: Proposal | OwnHead,
        lead: Lead,
        error: TandemError | None = None,
    ) -> Verification:
        """Have a round verified that has no target yet, or whose target has failed, on whichever goes on with it."""
        trouble = _Trouble(max(completion.length - self._options.prompt_length, 0))
        while True:
            if isinstance(error, InvalidRequestError) and isinstance(asked, Proposal):
                completion.check_grammar(asked.token_ids)
            if error is not None:
                await self._go_elsewhere(error, trouble)
            try:
                place = self._place = self._place or self._enter(await self._member(trouble))
                # Suspects one after the other: the cause would take the innocent with it once more.
                async with self._pool.trial if trouble.is_suspect else nullcontext():
                    if trouble.losses:
                        # One that died together with the last is no second death.
                        await place.member.check()
                    verification = await self._ask(place, completion, asked, lead)
            except TandemError as failure:
                error = failure
            else:
                self._resume(trouble)
                return verification

    async def _ask(
        self, place: _Place, completion: Completion, asked: Proposal | OwnHead, lead: Lead
    ) -> Verification:
        if isinstance(asked, OwnHead) and not place.member.has_head:
            asked = Proposal(completion.length)
        most = asked.max_tokens if isinstance(asked, OwnHead) else len(asked)
        is_first = place.sequence.is_new
        asked_at = time.monotonic()
        verification = await place.member.unanswered.wait(
            place.sequence.verify(completion.token_ids, asked, lead),
            place.sequence,
            (completion.length if is_first else 1) + most,
            is_first=is_first,
            until=None if self._left is None else asked_at + MOVE_SECONDS,
        )
        self.has_read = is_first
        cache = place.sequence.cache
        if self._cached_tokens is None and cache is not None:
            self._cached_tokens = min(cache.cached_tokens, self._options.prompt_length)
        if is_first and place.weights is not None and self.weights[-1:] != (place.weights,):
            self.weights = (*self.weights, place.weights)
        if not is_first:
            place.member.step.add(time.monotonic() - asked_at)
        if self._left is not None:
            # It has moved: nothing holds it back where it was
            self._leave(self._left)
            self._left = None
        return verification

    def find_led(self, completion: Completion) -> Proposal | OwnHead | None:
        return None if self._place is None else self._place.sequence.find_led(completion.token_ids)

    def pass_on(self, outcomes: DraftedOutcomes) -> None:
        if self._place is not None:
            self._place.sequence.pass_on(outcomes)

    @property
    def lead_stats(self) -> LeadStats:
        """Rounds that targets began by themselves."""
        total = replace(self._ended_leads)
        if self._place is not None:
            total.rounds += self._place.sequence.stats.rounds
            total.wasted += self._place.sequence.stats.wasted
        return total

    @property
    def cache(self) -> CacheCounts | None:
        """Tokens of the prompt that the first target had computed before, and preemptions on all targets; None where no
        target has said so."""
        if self._cached_tokens is None:
            return None
        sequence = None if self._place is None else self._place.sequence
        return CacheCounts(self._cached_tokens, self._ended_preemptions + _preemptions(sequence))

    async def finish(self) -> None:
        if self._place is not None:
            await self._place.sequence.finish()

    def release(self) -> None:
        """Leave the target between two rounds. The next round sends all tokens to a target."""
        self.cancel()

    def cancel(self) -> None:
        for place in (self._place, self._left):
            if place is not None:
                self._leave(place)
        self._place = None
        self._left = None

    def _leave(self, place: _Place, error: TandemError | None = None) -> None:
        place.leave(error)
        self._ended_leads.rounds += place.sequence.stats.rounds
        self._ended_leads.wasted += place.sequence.stats.wasted
        self._ended_preemptions += _preemptions(place.sequence)

    async def _member(self, trouble: _Trouble) -> Member[TargetClient]:
        """The least busy target that may be asked; waits for one if there is none."""
        seconds = self._deadline.at_most(self._wait_seconds)
        if trouble.is_suspect:
            member = await self._member_for_suspect(trouble, seconds)
        else:
            member = await self._pool.wait_for_ready(seconds, trouble.avoided, self._fingerprint)
        if member is not None:
            return member
        if not self._pool.has_weights(self._fingerprint):
            raise AbortedError(
                f"the target's weights {self._fingerprint[:12]}, which began the request, were replaced, and no target "
                f"goes on with it; {trouble.sentence}"
            )
        fields = {"request_id": self._options.request_id, "replicas": self._pool.reasons()}
        logger.warning("no target is ready", extra=fields)
        if trouble.is_suspect:
            raise trouble.end()
        raise ServiceUnavailableError(
            f"no target service was ready within {seconds:.3g} s; {trouble.sentence}"
        )

    async def _member_for_suspect(self, trouble: _Trouble, seconds: float) -> Member[TargetClient] | None:
        """The least busy target that a suspect may reach, or any once those that it lost live; None if there is none in
        time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            shunned = [member for member in self._pool.members.values() if trouble.shuns(member)]
            if (member := self._pool.choose(shunned, self._fingerprint)) is not None:
                return member
            # Nobody is told that a process which was taken for dead answers
            await asyncio.sleep(_SUSPECT_POLL_SECONDS)
        return None

    @property
    def _fingerprint(self) -> str:
        """Of the weights that a target must go on with; empty where none has begun."""
        return self.weights[-1].fingerprint if self.weights else ""

    def _enter(self, member: Member[TargetClient]) -> _Place:
        observer = self._observer.stream("target", member.address)
        options = replace(self._options, weights_fingerprint=member.weights_fingerprint)
        sequence = TargetSequence(member.client, options, self._rows, observer, self.on_states)
        return _Place(member, sequence, None if member.model is None else member.model.weights)

    def _leave_if_draining(self) -> None:
        """Between two rounds, move off a draining target. The old stream stays open until the new target answers."""
        if self._place is None or time.monotonic() < self._next_move:
            return
        if self._place.member.state is not ReplicaState.DRAINING:
            return  # a suspected target may recover, and one that is gone breaks its streams
        member = self._pool.choose({self._place.member}, self._fingerprint)
        if member is not None:
            self._left = self._place
            self._place = self._enter(member)

    async def _go_elsewhere(self, error: TandemError, trouble: _Trouble) -> None:
        """Prepare another attempt at the round."""
        trouble.began = trouble.began or time.monotonic()
        place = self._place
        self._place = None
        if place is None:
            raise error
        self._leave(place, error)
        if self._left is not None:
            self._place = self._left
            self._left = None
            self._next_move = time.monotonic() + 10.0
        elif isinstance(error, CapacityError):
            await self._wait_for_room(error, place, trouble)
        else:
            self._count_loss(error, place, trouble)
            if len(trouble.losses) >= MAX_LOSSES:
                await self._weigh_deaths(trouble)

    async def _wait_for_room(self, error: CapacityError, place: _Place, trouble: _Trouble) -> None:
        """Handle a full target. A sequence that lost its target waits for room; a new request is refused."""
        trouble.avoided.add(place.member)
        if self._pool.choose(trouble.avoided) is not None:
            return
        if not (place.sequence.is_new and trouble.delivered) or trouble.seconds >= self._wait_seconds:
            raise error
        await asyncio.sleep(self._deadline.at_most(0.25))
        trouble.avoided.clear()

    def _count_loss(self, error: TandemError, place: _Place, trouble: _Trouble) -> None:
        member = place.member
        reason = str(error)
        # A service that has seen a step may have been lost because of it.
        if place.sequence.was_sent and not isinstance(error, InvalidRequestError):
            instance_id = "" if member.model is None else member.model.instance_id
            trouble.losses.append(_Loss(member, instance_id, time.monotonic()))
        trouble.is_reported = True
        self._events.replica_changed(
            "target_lost",
            "target lost; the sequence goes on elsewhere",
            logging.WARNING,
            address=member.address,
            reason=reason,
            completion_tokens=trouble.delivered,
        )
        if trouble.seconds >= self._wait_seconds:
            raise ServiceUnavailableError(
                f"the target service was lost, and none went on within {self._wait_seconds:.3g} s; "
                f"{trouble.sentence}"
            )
        if isinstance(error, ServiceUnavailableError):
            member.suspect(reason)
            return
        if isinstance(error, UnauthenticatedError | PermissionDeniedError):
            member.doubt(reason)
            return
        trouble.avoided.add(member)
        trouble.doubted[member] = reason
        if not self._pool.has_other(trouble.avoided):
            if isinstance(error, InvalidRequestError):
                words = reason.partition("\n")[0]
                said = words if len(words) <= _REFUSAL_CHARACTERS else f"{words[:_REFUSAL_CHARACTERS]}..."
                raise InvalidRequestError(f"no target service takes the request; one says: {said}") from error
            # The error's text is for the log only: it describes internals.
            raise ProtocolError(
                f"no target service could go on with the request {self._options.request_id}; {trouble.sentence}"
            ) from error

    async def _weigh_deaths(self, trouble: _Trouble) -> None:
        """Handle a request in one round of which many targets were lost: it ends if they have died, and waits a little
        if they live, behind a link that breaks again and again."""
        last = time.monotonic() + self._deadline.at_most(UNANSWERED_SECONDS)
        while len(trouble.deaths) >= MAX_LOSSES:
            if time.monotonic() >= last:
                raise trouble.end()
            await asyncio.sleep(_SUSPECT_POLL_SECONDS)
        seconds = min(0.125 * 2 ** (len(trouble.losses) - MAX_LOSSES), _MAX_RETRY_SECONDS)
        await asyncio.sleep(self._deadline.at_most(seconds))

    def _resume(self, trouble: _Trouble) -> None:
        """A target goes on with the round, after what has happened in it."""
        for member, reason in trouble.doubted.items():
            if self._place is None or member is not self._place.member:
                member.doubt(reason)
        if trouble.is_reported:
            self._events.replica_changed(
                "target_resumed",
                "target resumed",
                address=self.address or "",
                seconds=round(trouble.seconds, 3),
            )


def _preemptions(sequence: TargetSequence | None) -> int:
    """Preemptions of a sequence on its target, as far as the target says."""
    return 0 if sequence is None or sequence.cache is None else sequence.cache.preemptions
