"""Verifies on whichever target is there: a client sees a pause when one is lost, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from coordinator.completion import Completion
from coordinator.deadline import Deadline
from coordinator.observer import RequestObserver
from coordinator.pace import Pace
from coordinator.pool import Pool
from coordinator.pool_member import Member
from coordinator.replica import ReplicaState
from coordinator.requests import ActiveRequest
from coordinator.round_account import RoundAccount
from coordinator.target_client import RowChoice, TargetClient, TargetSequence
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.types import Proposal, TargetOptions, Verification

logger = logging.getLogger(__name__)

MOST_LOSSES = 3
"""A request that loses as many targets over one round may well be what ends them: it ends first."""
_FULL_SECONDS = 0.25
"""How long to wait before full targets are asked again."""
_MOVE_SECONDS = 5.0
"""How long a sequence that may stay where it is waits for the target that it moves to, which may be full."""
_NEXT_MOVE_SECONDS = 10.0
"""How long it stays after it could not be moved."""


@dataclass(slots=True, eq=False)
class _Trouble:
    """What has gone wrong in the round in progress."""

    began: float = field(default_factory=time.monotonic)
    losses: int = 0
    """Targets that were lost after they were asked."""
    is_told: bool = False
    """Whether the observer knows."""
    avoided: set[Member[TargetClient]] = field(default_factory=set)
    """Targets that had no room, or answered nonsense."""

    @property
    def seconds(self) -> float:
        """For how long already."""
        return time.monotonic() - self.began


@dataclass(slots=True, eq=False)
class _Place:
    """A sequence and the target that it is on."""

    member: Member[TargetClient]
    sequence: TargetSequence

    def leave(self) -> None:
        self.sequence.cancel()
        self.member.open_sequences -= 1


class FailoverVerifier:
    """Asks one target for rows for as long as it lives, and then another, with all tokens and the same proposal.

    Noise is keyed by seed, position and base length, so the repeated round has the result that the lost one would have
    had.
    """

    def __init__(
        self,
        pool: Pool[TargetClient],
        options: TargetOptions,
        rows: RowChoice,
        active: ActiveRequest,
        observer: RequestObserver,
        pace: Pace,
        deadline: Deadline,
        wait_seconds: float,
    ) -> None:
        self._pool = pool
        self._options = options
        self._rows = rows
        self._active = active
        self._observer = observer
        self._pace = pace
        self._deadline = deadline
        self._wait_seconds = wait_seconds
        self._place: _Place | None = None
        self._left: _Place | None = None
        self._next_move = 0.0
        self._account = RoundAccount()

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The target's row at each position of the proposal, and at the one after it.

        Raises:
            InvalidRequestError: the target refuses the request as it is.
            CapacityError: no target has room for it.
            ServiceUnavailableError: no target is there in time.
            TandemError: the only target answers nonsense, or the request has lost too many.
        """
        self._account.settle()
        self._leave_what_drains()
        trouble = _Trouble()
        while True:
            try:
                verification = await self._attempt(completion, proposal, trouble)
            except (InvalidRequestError, DeadlineError):
                raise
            except TandemError as error:
                await self._go_elsewhere(error, trouble)
            else:
                if trouble.is_told:
                    self._tell_resumed(trouble)
                return verification

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._place is not None:
            await self._place.sequence.finish()

    def cancel(self) -> None:
        """Drop the stream, whatever it is doing."""
        self._account.settle()
        for place in (self._place, self._left):
            if place is not None:
                place.leave()
        self._place = self._left = None

    async def _attempt(self, completion: Completion, proposal: Proposal, trouble: _Trouble) -> Verification:
        place = self._place = self._place or self._enter(await self._member(trouble))
        is_first = place.sequence.is_new
        began = time.monotonic()
        verification = await self._verified(place, completion, proposal)
        seconds = time.monotonic() - began
        self._pace.verified(seconds, len(proposal), is_first=is_first)
        if not is_first:
            place.member.step.add(seconds)
        if self._left is not None:
            self._left.leave()
            self._left = None
        self._account.begin(completion, place.member.figures, len(proposal))
        return verification

    async def _verified(self, place: _Place, completion: Completion, proposal: Proposal) -> Verification:
        if self._left is None:
            return await place.sequence.verify(completion, proposal)
        try:
            async with asyncio.timeout(_MOVE_SECONDS):
                return await place.sequence.verify(completion, proposal)
        except TimeoutError:
            raise ServiceUnavailableError(
                f"target service: it did not take the sequence over within {_MOVE_SECONDS:g} s"
            ) from None

    async def _member(self, trouble: _Trouble) -> Member[TargetClient]:
        """The target to go to, waiting for one for a while."""
        seconds = self._deadline.at_most(self._wait_seconds)
        member = self._pool.choose(trouble.avoided) or await self._pool.chosen(seconds, trouble.avoided)
        if member is None:
            logger.warning("no target is ready", extra={**self._whose, "replicas": self._pool.reasons()})
            raise ServiceUnavailableError(
                f"no target service was ready within {seconds:.3g} s; {self._delivered()}"
            )
        return member

    def _enter(self, member: Member[TargetClient]) -> _Place:
        watch = self._observer.stream("target", member.address)
        sequence = member.client.sequence(self._options, self._rows, watch)
        member.open_sequences += 1
        self._active.target_address = member.address
        return _Place(member, sequence)

    def _leave_what_drains(self) -> None:
        """Between two rounds, move to a target that stays. The old place is kept until the new one has answered."""
        if self._place is None or time.monotonic() < self._next_move:
            return
        if self._place.member.state is not ReplicaState.DRAINING:
            return  # a target that is only suspected may well go on, and one that is gone breaks its streams
        member = self._pool.choose({self._place.member})
        if member is not None:
            self._left, self._place = self._place, self._enter(member)

    async def _go_elsewhere(self, error: TandemError, trouble: _Trouble) -> None:
        """Make room for another attempt at the round.

        Raises:
            TandemError: there is to be none.
        """
        place, self._place = self._place, None
        if place is None:
            raise error  # nowhere to go
        place.leave()
        if self._left is not None:
            self._move_back()
        elif isinstance(error, CapacityError):
            await self._when_there_is_room(error, place, trouble)
        else:
            self._count_loss(error, place, trouble)

    def _move_back(self) -> None:
        assert self._left is not None
        self._place, self._left = self._left, None
        self._active.target_address = self._place.member.address
        self._next_move = time.monotonic() + _NEXT_MOVE_SECONDS

    async def _when_there_is_room(self, error: CapacityError, place: _Place, trouble: _Trouble) -> None:
        """A target that is full refuses a new sequence. One that was moved there by a loss waits for its turn."""
        trouble.avoided.add(place.member)
        if self._pool.choose(trouble.avoided) is not None:
            return
        has_begun = self._active.completion_tokens > 0
        if not (place.sequence.is_new and has_begun) or trouble.seconds >= self._wait_seconds:
            raise error
        await asyncio.sleep(self._deadline.at_most(_FULL_SECONDS))
        trouble.avoided.clear()

    def _count_loss(self, error: TandemError, place: _Place, trouble: _Trouble) -> None:
        trouble.losses += place.sequence.was_asked
        trouble.is_told = True
        member, reason = place.member, str(error)
        logger.warning(
            "target lost; the sequence goes on elsewhere",
            extra={**self._whose, "address": member.address, "reason": reason},
        )
        tokens = self._active.completion_tokens
        self._observer.event(
            "target_lost", {"address": member.address, "reason": reason, "completion_tokens": tokens}
        )
        if trouble.losses >= MOST_LOSSES:
            # Not as unavailable: clients try that again, and the next targets would follow.
            raise TandemError(
                f"{trouble.losses} targets were lost over the same tokens of this request, so it is not tried on "
                f"another; {self._delivered()}"
            )
        if trouble.seconds >= self._wait_seconds:
            raise ServiceUnavailableError(
                f"the target service was lost, and none went on within {self._wait_seconds:.3g} s; "
                f"{self._delivered()}"
            )
        if isinstance(error, ServiceUnavailableError):
            member.suspect(reason)
            return
        trouble.avoided.add(member)
        if self._pool.choose(trouble.avoided) is None:
            # Its words are for the log: they tell of our insides.
            raise ProtocolError(
                f"no target service could go on with the request {self._options.request_id}; {self._delivered()}"
            ) from error

    def _tell_resumed(self, trouble: _Trouble) -> None:
        seconds = trouble.seconds
        address = self._active.target_address or ""
        logger.info(
            "target resumed",
            extra={**self._whose, "address": address, "seconds": round(seconds, 3)},
        )
        self._observer.event("target_resumed", {"address": address, "seconds": seconds})

    @property
    def _whose(self) -> dict[str, str]:
        """Tells whose line it is in the log."""
        return {"request_id": self._options.request_id}

    def _delivered(self) -> str:
        count = self._active.completion_tokens
        return f"{count} token{'' if count == 1 else 's'} had been delivered"
