"""How a target leads: the step that it takes by itself behind one whose round it can decide.

A round comes to a `RoundOutcome`, and a `Source` says what is proposed behind it: what a draft service has pushed,
which may be nothing, or what the target itself finds when the step begins, in the text's repeats or by its own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem.model.types import (
    ENDED,
    Acceptance,
    Delta,
    DraftedOutcomes,
    GoesOn,
    NextToken,
    Proposal,
    RowKind,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
    common_length,
)


class RoundOutcome(NamedTuple):
    """A round's result: the tokens that it adds to a sequence."""

    base_length: int
    """Length of the sequence that the round's proposal extends."""
    kept: tuple[int, ...]
    """The accepted tokens, and the one that follows them."""

    @property
    def accepted_count(self) -> int:
        return len(self.kept) - 1

    @property
    def next_token_id(self) -> int:
        return self.kept[-1]

    @property
    def accepted_length(self) -> int:
        """Length of the sequence with the accepted tokens."""
        return self.base_length + len(self.kept) - 1


def read_outcome(step: VerifyStep, answer: Verification) -> RoundOutcome | None:
    """The outcome of a round whose proposal was given: its token rows tell. None where the target may not go by them.

    Those up to the first that differs from the proposal are the outcome.
    """
    if not step.lead or step.row_kind is not RowKind.TOKEN:
        return None
    token_ids = tuple(row.token_id for row in answer.rows if isinstance(row, TokenRow))
    proposed = step.delta.token_ids[len(step.delta.token_ids) - step.row_count + 1 :]
    return RoundOutcome(answer.base_length, token_ids[: common_length(proposed, token_ids) + 1])


def decided_outcome(
    answer: Verification, proposal: Proposal, acceptance: Acceptance | None
) -> RoundOutcome | None:
    """The outcome of a round that a rule has decided; None where it has not, or where no token follows."""
    if acceptance is None or acceptance.next_token is NextToken.NONE:
        return None
    return RoundOutcome(answer.base_length, acceptance.kept(proposal))


class Source(Protocol):
    """Where the proposals of led steps come from."""

    def find(self, outcome: RoundOutcome, room: int) -> GoesOn | None:
        """The step behind an outcome, where the sequence has room for so many proposed tokens; None if the target
        waits until it is asked."""

    def step(self, goes_on: GoesOn, lead: int) -> VerifyStep:
        """The same as a target takes it, which may take so many behind it."""


class _RoundOutcomes(NamedTuple):
    base_length: int
    keys: tuple[tuple[int, int], ...]
    """Each outcome: number of accepted tokens, and the token that follows them; the likeliest first."""
    proposals: dict[tuple[int, int], tuple[int, ...]]


class OutcomeTable:
    """The outcomes of one round of a sequence, as far as the draft has pushed them.

    One thread adds while another may look up: a round's entries only grow, and a new round replaces them in one step.
    """

    def __init__(self) -> None:
        self._round = _RoundOutcomes(-1, (), {})

    def add(self, drafted: DraftedOutcomes) -> bool:
        """Take one depth of the outcomes of a round; false for one whose first depth is missing, which is dropped."""
        depth = drafted.depth
        token_ids = drafted.token_ids
        if depth == 0:
            keys = tuple(zip(drafted.accepted_counts, drafted.next_token_ids, strict=False))
            self._round = _RoundOutcomes(drafted.base_length, keys, {})
        base_length, keys, proposals = self._round
        if drafted.base_length != base_length:
            return False
        for index, (key, token_id) in enumerate(zip(keys, token_ids, strict=False)):
            before = proposals.get(key, ())[:depth]
            # With fewer, a message was lost: whoever else has the table must not read other tokens in it.
            if token_id != ENDED and len(before) == depth:
                proposals[key] = (*before, token_id, *(drafted.lead_token_ids if index == 0 else ()))
        return True

    def find(self, outcome: RoundOutcome) -> tuple[int, ...]:
        """The proposal for an outcome; empty where there is none."""
        known = self._round
        if known.base_length != outcome.base_length:
            return ()
        return known.proposals.get((outcome.accepted_count, outcome.next_token_id), ())

    def misses(self, outcome: RoundOutcome) -> bool:
        """True for an outcome that the draft has not drafted for, in a round that it has drafted for."""
        known = self._round
        key = outcome.accepted_count, outcome.next_token_id
        return known.base_length == outcome.base_length and key not in known.keys


@dataclass(frozen=True, slots=True)
class Pushed:
    """A draft service's proposal for the outcome. Where it has pushed none, the target runs ahead alone."""

    table: OutcomeTable
    min_proposed: int = 0
    alone_after_miss: bool = False
    """See `VerifyStep` for both."""

    def find(self, outcome: RoundOutcome, room: int) -> GoesOn | None:
        proposed = self.table.find(outcome)[:room]
        is_enough = len(proposed) >= min(self.min_proposed, room)
        if is_enough or (self.alone_after_miss and self.table.misses(outcome)):
            return GoesOn(Delta(outcome.accepted_length, (outcome.next_token_id, *proposed)))
        return None

    def step(self, goes_on: GoesOn, lead: int) -> VerifyStep:
        return VerifyStep(goes_on.delta, RowKind.TOKEN, len(goes_on.delta.token_ids), lead=lead)


@dataclass(frozen=True, slots=True)
class Own:
    """The target's own proposal, made when the step begins: a repetition in the text, or its head's draft."""

    max_tokens: int
    row_kind: RowKind
    with_statistics: bool

    def find(self, outcome: RoundOutcome, room: int) -> GoesOn | None:
        return GoesOn(Delta(outcome.accepted_length, (outcome.next_token_id,)), self.max_tokens)

    def step(self, goes_on: GoesOn, lead: int) -> VerifyStep:
        return VerifyStep(
            goes_on.delta,
            self.row_kind,
            1,
            with_statistics=self.with_statistics,
            lead=lead,
            own_tokens=goes_on.own_tokens,
        )


class Leading:
    """How one sequence is led. The event loop asks and adds while the engine's thread reads."""

    def __init__(self) -> None:
        self._table = OutcomeTable()
        self._source: Source = Pushed(self._table)

    def ask(self, step: VerifyStep) -> None:
        """Lead from now on as the step says that was asked for."""
        if step.own_tokens is None:
            self._source = Pushed(self._table, step.min_proposed, step.alone_after_miss)
        else:
            self._source = Own(step.own_tokens, step.row_kind, step.with_statistics)

    def add(self, drafted: DraftedOutcomes) -> bool:
        """See `OutcomeTable.add`."""
        return self._table.add(drafted)

    def find(self, outcome: RoundOutcome | None, options: TargetOptions) -> GoesOn | None:
        """The step that follows an outcome; None where the sequence ends, or the target waits until it is asked."""
        if outcome is None:
            return None
        room = options.max_length - outcome.accepted_length - 1
        if room <= 0 or any(token_id in options.end_token_ids for token_id in outcome.kept):
            return None
        return self._source.find(outcome, room - 1)

    def step(self, goes_on: GoesOn, lead: int) -> VerifyStep:
        """See `Source`."""
        return self._source.step(goes_on, lead)
