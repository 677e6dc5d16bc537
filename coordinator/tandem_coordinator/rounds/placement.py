"""Where a sequence is open: on one replica, and for drafts how it is chosen, watched, lost and left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from tandem.errors import CapacityError, ServiceUnavailableError, TandemError
from tandem.model.types import AheadBudget, DraftOptions, Proposal
from tandem.serving.scopes import RequestScopes
from tandem_coordinator.replicas.pool import ClientT, Member, Pool
from tandem_coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from tandem_coordinator.transport.draft_client import (
    DraftClient,
    DraftLimits,
    DraftSequence,
    OnOutcomes,
    Tokens,
)
from tandem_coordinator.transport.target_client import TargetSequence

SequenceT = TypeVar("SequenceT", DraftSequence, TargetSequence)

MAX_FAULTS = 8
"""A sequence that loses so many drafts goes on without one."""
ABANDON_SECONDS = 1.0
"""A sequence abandons a draft that is late by more than this if another is ready. It stays with one that never
answered: leaving would lose its place in that draft's queue."""
_REOPEN_SECONDS = 2.0
"""A draft that is late by more than this may have lost the question, the answer or the sequence, which begins anew, on
the same draft if there is no other."""


@dataclass(slots=True, eq=False)
class OpenSequence(Generic[ClientT, SequenceT]):
    """A sequence that is open on a replica, and counts there until it is left."""

    member: Member[ClientT]
    sequence: SequenceT

    def __post_init__(self) -> None:
        self.member.open_sequences += 1

    def leave(self, error: TandemError | None = None) -> None:
        """Drop the sequence there, with an error because it has failed."""
        self.sequence.cancel(error)
        self.member.open_sequences -= 1


def expected_seconds(member: Member[DraftClient], token_count: int, unread: int = 0) -> float:
    """When a draft's next proposal of so many tokens would be here: its way, its queue, and its steps with one sequence
    more, by its own profile and by what it says of the sequences of all its callers; before them it reads `unread`
    tokens. Seconds; 0 for a draft without a profile, of which nothing is expected."""
    load = member.client.load
    steps = member.model.step_profile.seconds if member.model is not None else {}
    if not steps:
        return 0.0
    sequences = max(load.sequences, member.open_sequences) + 1
    seconds = (
        (member.round_trip.value or 0.0) + load.wait_seconds + token_count * _step_seconds(steps, sequences)
    )
    read = max(((tokens, each) for (of, tokens), each in steps.items() if of == 1), default=None)
    return seconds if read is None else seconds + unread * read[1] / read[0]


def _step_seconds(steps: Mapping[tuple[int, int], float], sequences: int) -> float:
    """Seconds of a step of one token for so many sequences: as for the next size that was measured."""
    sizes = sorted((count, seconds) for (count, tokens), seconds in steps.items() if tokens == 1)
    if not sizes:
        return 0.0
    return next((seconds for count, seconds in sizes if count >= sequences), sizes[-1][1])


def earliest(seconds: Mapping[Member[DraftClient], float]) -> Member[DraftClient]:
    """The draft with the earliest answer; one with a free place before one without, and of those that are equally
    early, the one with the fewest sequences."""
    free = [member for member in seconds if not member.client.load.is_full] or list(seconds)
    first = min(seconds[member] for member in free)
    # Times within a tenth and a millisecond are equal: round trips vary as much from one to the next
    near = [member for member in free if seconds[member] <= 1.1 * first + 0.001 or not first]

    def busyness(member: Member[DraftClient]) -> tuple[int, float]:
        return max(member.open_sequences, member.client.load.sequences), member.step.value or 0.0

    return min(near, key=busyness)


@dataclass(slots=True, eq=False)
class DraftPlacement:
    """Keeps a sequence on one draft for as long as that serves it, then on another, which receives all tokens again."""

    _pool: Pool[DraftClient]
    _options: DraftOptions
    """Without a scope, which depends on the draft."""
    _scopes: RequestScopes
    _limits: DraftLimits
    _lost: Callable[[Member[DraftClient], TandemError], None]
    _observer: Callable[[str], StreamObserver] = lambda _: NO_OBSERVER
    _on_outcomes: OnOutcomes = None
    current: OpenSequence[DraftClient, DraftSequence] | None = None
    _losses: int = 0
    _faults: int = 0
    """Losses other than a lack of room."""
    _rounds: int = 0
    """Proposals since the last loss."""
    _retry_at: dict[Member[DraftClient], float] = field(default_factory=dict)
    _late: set[Member[DraftClient]] = field(default_factory=set)
    """Drafts that were left because they were late: no round waits for them until they answer."""

    @property
    def address(self) -> str | None:
        return None if self.current is None else self.current.member.address

    @property
    def goes_without(self) -> bool:
        return self._faults >= MAX_FAULTS or self._pool.choose() is None

    def candidate(
        self, *avoided: Member[DraftClient], tokens: Tokens | None = None
    ) -> Member[DraftClient] | None:
        """The draft to enter now, other than these: the one that answers first, with these tokens to read; None if
        there is none."""
        if self._faults >= MAX_FAULTS:
            return None
        now = time.monotonic()
        ready = [
            member
            for member in self._pool.members.values()
            if member.is_ready and member not in avoided
            if now >= self._retry_at.get(member, 0.0)
        ]
        if len(ready) < 2:
            return ready[0] if ready else None
        token_ids = () if tokens is None else tokens.token_ids
        held = self._pool.prefixes.held(self._scopes.prefix, token_ids)
        count = self._limits.num_speculative_tokens
        return earliest(
            {
                member: expected_seconds(member, count, len(token_ids) - held.get(member.address, 0))
                for member in ready
            }
        )

    def enter(self, member: Member[DraftClient], tokens: Tokens) -> DraftSequence:
        """Open the sequence on a draft, which reads it while the target works."""
        model = member.model
        assert model is not None, "only a draft that was met is entered"
        options = replace(
            self._options, scope=self._scopes.prefix if model.has_model else self._scopes.suffix
        )
        if not model.drafts_ahead:
            options = replace(options, ahead=None)
        if member.coverage is None:
            options = replace(options, tokenizer_hash="")
        observer = self._observer(member.address)
        sequence = DraftSequence(member.client.streams, options, self._limits, observer, self._on_outcomes)
        self.current = OpenSequence(member, sequence)
        self._pool.prefixes.add(member.address, self._scopes.prefix, tokens.token_ids)
        sequence.read(tokens)
        return sequence

    def leave(self, error: TandemError | None = None) -> None:
        if self.current is not None:
            self.current.leave(error)
            self.current = None

    def leave_for_better(self) -> None:
        """Leave a draft that drains or hangs if another can take over, and one that has lost the sequence."""
        if self.current is None:
            return
        member = self.current.member
        sequence = self.current.sequence
        has_lost = self._has_lost_sequence()
        hangs = has_lost or (sequence.is_open and sequence.late_seconds > ABANDON_SECONDS)
        is_good = member.is_ready and not hangs
        if not has_lost and (is_good or not self.candidate(member)):
            return
        if hangs:
            self._late.add(member)
            self.lose(ServiceUnavailableError(f"it has been late for {sequence.late_seconds:.1f} s"))
        else:
            self.leave()

    def _has_lost_sequence(self) -> bool:
        """True if the answer to the last step will hardly come any more."""
        assert self.current is not None
        member = self.current.member
        sequence = self.current.sequence
        if not sequence.is_late or (member.client.load.is_full and not sequence.is_open):
            return False
        # One that has never answered may have much to read
        reading = 0.0 if sequence.is_open else 4.0 * expected_seconds(member, 0, sequence.held)
        return sequence.late_seconds > _REOPEN_SECONDS + reading

    def lose(self, error: TandemError) -> None:
        """Leave the draft, which has failed, and avoid it for a while, twice as long each time."""
        assert self.current is not None, "only a draft that was entered can be lost"
        member = self.current.member
        if isinstance(error, ServiceUnavailableError) and not self.current.sequence.is_late:
            member.suspect(str(error))
        wait = min(0.1 * 2 ** min(self._losses, 6), 5.0)
        self._retry_at[member] = time.monotonic() + wait
        self._losses += 1
        self._faults += not isinstance(error, CapacityError)
        self._rounds = 0
        self._lost(member, error)
        self.leave(error)

    def count_proposal(self) -> None:
        """The draft has proposed. After enough proposals, earlier losses are forgiven."""
        self._rounds += 1
        if self._rounds >= 32:
            self._losses = self._faults = 0

    def must_read(self, tokens: Tokens) -> bool:
        """True if the draft lacks so many tokens that it reads them while the target goes on alone for a round. It then
        begins to."""
        assert self.current is not None
        sequence = self.current.sequence
        if sequence.unread(tokens) <= 32:
            return False
        sequence.read(tokens)
        return True

    async def asked(
        self, tokens: Tokens, count: int, seconds: float, budget: AheadBudget | None
    ) -> tuple[Proposal | None, float | None]:
        """Ask the draft for up to `count` tokens: the proposal, None while it is late; and the seconds of the step,
        None if it waited for an earlier one, since that says nothing about the time of steps."""
        current = self.current
        assert current is not None
        was_idle = current.sequence.is_idle
        began = time.monotonic()
        # One that is idle has read its prompt, in a place of its own
        is_unread = not was_idle and not current.sequence.is_open
        waits = is_unread and current.member.client.load.is_full
        was_late = current.member in self._late
        if (waits and not self._limits.keeps_proposals) or (was_late and is_unread):
            seconds = 0.0  # it may have its place in a while, and the round goes on without it
        proposal = await current.sequence.propose(tokens, count, seconds, budget)
        if proposal is not None:
            self._late.discard(current.member)
        if proposal is None or not was_idle:
            return proposal, None
        step_seconds = time.monotonic() - began
        current.member.step.add(step_seconds)
        return proposal, step_seconds

    async def finish(self) -> None:
        if self.current is not None:
            await self.current.sequence.finish()
