"""One sequence of vLLM on whichever draft is there. Lives on the event loop of `link`.

The round loop's `FailoverDrafter` does the same for a request of ours; it decides by the rounds of one request, where
here a step of vLLM waits for all of its sequences at once.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.failover.draft_losses import DraftLosses
from coordinator.replicas.member import Member
from coordinator.replicas.pool import Pool
from coordinator.speculation.waiting import Unfinished, tokens_after_hit
from coordinator.transport.draft_client import DraftClient
from coordinator.transport.draft_sequence import DraftSequence
from coordinator.transport.proposal_checks import DraftLimits
from tandem.errors import CapacityError, ServiceUnavailableError, TandemError
from tandem.integrations.vllm.counts import Counts
from tandem.types import AheadBudget, DraftOptions, Proposal

logger = logging.getLogger(__name__)

_MAX_UNREAD = 32
"""A draft that lacks more tokens than this reads them while vLLM goes on alone."""
_ABANDON_SECONDS = 1.0
"""A sequence abandons a draft that is late by more than this if another is ready."""
_DEPTH_PATIENCE = 1.5
"""Times the expected time until a continuation is long enough that a step waits for it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The question that a step has for one sequence."""

    count: int
    """Tokens to propose; 0: only take note of the tokens."""
    until: float
    """When the step goes on without, by the monotonic clock."""
    budget: AheadBudget | None
    """How far to draft ahead of the step."""
    expected: Sequence[float]
    """Expected tokens of a step with a proposal of 0, 1, ..., `count` tokens."""
    tokens_per_second: float
    """Speed of a sequence now."""


@dataclass(slots=True, eq=False)
class _Place:
    """A sequence on a draft."""

    member: Member[DraftClient]
    sequence: DraftSequence

    def leave(self) -> None:
        self.sequence.cancel()
        self.member.open_sequences -= 1


class DraftedRow:
    """The tokens of one sequence, and its place on a draft."""

    def __init__(
        self, pool: Pool[DraftClient], options: DraftOptions, limits: DraftLimits, counts: Counts
    ) -> None:
        self._pool = pool
        self._options = options
        self._limits = limits
        self._counts = counts
        self._losses = DraftLosses()
        self._place: _Place | None = None
        self._tokens = array("i")
        self.timed_out = False
        """True if the last step waited for its proposal in vain."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens."""
        return self._tokens

    @property
    def length(self) -> int:
        """How many."""
        return len(self._tokens)

    @property
    def is_placed(self) -> bool:
        """True while a draft holds it."""
        return self._place is not None

    @property
    def may_answer(self) -> bool:
        """True while a draft holds it that is not late."""
        return self._place is not None and not self._place.sequence.is_late

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. Not while a proposal is awaited: its draft would be taken to have extended others."""
        self._tokens.extend(tokens)

    async def propose(self, ask: Ask) -> tuple[int, ...]:
        """Tokens that may follow; none when no draft has any in time."""
        self.timed_out = False
        try:
            self._leave_for_better()
            if ask.count <= 0:
                return ()
            if self._place is None:
                self._enter()
                return ()
            return await self._asked(self._place, ask)
        except TandemError as error:
            self._lose(error)
            return ()

    async def finish(self) -> None:
        """End the sequence; the draft frees it at once. It may be entered again."""
        place, self._place = self._place, None
        if place is not None:
            try:
                await place.sequence.finish()
            finally:
                place.leave()

    def release(self) -> None:
        """Drop the stream, whatever the draft is doing."""
        if self._place is not None:
            self._place.leave()
            self._place = None

    async def _asked(self, place: _Place, ask: Ask) -> tuple[int, ...]:
        sequence = place.sequence
        count = min(ask.count, self._room(place.member))
        if count <= 0:
            return ()
        if sequence.awaits_outcome(self):
            drafted = await self._drafted_ahead(sequence, ask, count)
            if drafted is not None:
                sequence.go_on(self, drafted, ask.budget)
                self._losses.add_round()
                return drafted.token_ids
        if not sequence.is_idle:
            self._counts.late_rows += 1
            return ()  # it reads the prompt, or is late already
        if sequence.unread(self) > _MAX_UNREAD:
            sequence.read(self)
            return ()
        return await self._answered(place, ask, count)

    async def _answered(self, place: _Place, ask: Ask, count: int) -> tuple[int, ...]:
        """The draft's answer to a question, if it comes in time."""
        began = time.monotonic()
        proposal = await place.sequence.propose(self, count, max(ask.until - began, 0.0), ask.budget)
        if proposal is None:
            self.timed_out = True
            self._counts.late_rows += 1
            return ()
        place.member.step.add(time.monotonic() - began)
        self._losses.add_round()
        self._counts.answered_rows += 1
        return proposal.token_ids

    async def _drafted_ahead(self, sequence: DraftSequence, ask: Ask, count: int) -> Proposal | None:
        """The proposal that was drafted ahead of the step that has ended; None where another outcome came."""
        await self._wait_for_more(sequence, ask, count)
        sequence.take_branch_steps()
        drafted = sequence.drafted_ahead(self)
        self._counts.awaited_outcomes += 1
        if drafted is None or not drafted.token_ids:
            return None
        self._counts.hits += 1
        return drafted.cut(count)

    async def _wait_for_more(self, sequence: DraftSequence, ask: Ask, count: int) -> None:
        """Wait for the draft to go on with the continuation of the outcome that came, as far as that pays."""
        unfinished: Unfinished | None = sequence.unfinished(self)
        if unfinished is None:
            return
        most = min(count, unfinished.max_tokens, len(ask.expected) - 1)
        wanted = tokens_after_hit(
            ask.expected[: most + 1], unfinished, tokens_per_second=ask.tokens_per_second
        )
        more = wanted - unfinished.ready
        if more > 0:
            seconds = unfinished.due_seconds + (more - 1) * unfinished.step_seconds
            left = ask.until - time.monotonic()
            await sequence.reach_depth(self, wanted, min(_DEPTH_PATIENCE * seconds, left))

    def _room(self, member: Member[DraftClient]) -> int:
        """Tokens that the draft can still propose within its own length."""
        most = 0 if member.model is None else member.model.max_length
        return most - self.length if most else len(self._tokens) + 1

    def _enter(self) -> None:
        """Begin on the least busy draft, if there is one. It reads the sequence while vLLM works."""
        member = None if self._losses.are_too_many else self._pool.choose(self._losses.avoided)
        if member is None or self._room(member) <= self._limits.num_speculative_tokens:
            return
        sequence = member.client.sequence(self._options, self._limits)
        member.open_sequences += 1
        self._place = _Place(member, sequence)
        sequence.begin(self)

    def _leave_for_better(self) -> None:
        """Leave a draft that drains, hangs or is gone if another can take over."""
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
            self.release()

    def _lose(self, error: TandemError) -> None:
        """Leave the draft that has failed; the next step tries another one."""
        place = self._place
        if place is None:
            return
        if isinstance(error, ServiceUnavailableError) and not place.sequence.is_late:
            place.member.suspect(str(error))
        self._losses.add(place.member, is_fault=not isinstance(error, CapacityError))
        self._counts.lost_drafts += 1
        # A replica that goes down is reported once, by its member; here every sequence would repeat it.
        is_expected = isinstance(error, ServiceUnavailableError | CapacityError)
        logger.log(
            logging.DEBUG if is_expected else logging.WARNING,
            "draft lost",
            extra={"address": place.member.address, "reason": str(error)},
        )
        self.release()
