"""Outcomes drafted ahead: the actual one is found, stale ones are dropped, and their memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ProtocolError
from tandem.model.types import AheadBudget, DraftedOutcomes, Proposal, RowKind, SparseDistribution
from tandem_coordinator.outcomes import Coming, Hit, Idle, Miss
from tandem_coordinator.transport.draft_client import PendingOutcomes

VOCABULARY_SIZE = 12
PREFIX = (7, 8, 9)
PROPOSED = (1, 2, 3)
BUDGET = AheadBudget(branch_count=4, token_count=3)
BASE = len(PREFIX)

FIRST = DraftedOutcomes(BASE, 0, (4, 5, 6), (3, 0, 1), (10, 11, 1))
"""Token 4 follows all three and 10, 5 follows none and 11, and 6 follows the first and 1."""
SECOND = DraftedOutcomes(BASE, 1, (7, 8))


def support(*token_ids: int) -> SparseDistribution:
    return SparseDistribution(np.array(token_ids), np.full(len(token_ids), 1.0 / len(token_ids)))


def pending(
    *columns: DraftedOutcomes, kind: RowKind = RowKind.TOKEN, budget: AheadBudget | None = BUDGET
) -> PendingOutcomes:
    made = PendingOutcomes(VOCABULARY_SIZE, kind)
    made.expect(BASE, PROPOSED, budget)
    for column in columns:
        made.add(column)
    return made


def hit_in(outcomes: PendingOutcomes, *tokens: int) -> Hit | Coming:
    """The continuation that is there after the base and these tokens."""
    found = outcomes.outcome((*PREFIX, *tokens), 0.0)
    assert isinstance(found, Hit | Coming)
    return found


def found_in(outcomes: PendingOutcomes, *tokens: int) -> Proposal:
    return hit_in(outcomes, *tokens).proposal


def test_the_actual_outcome_is_found_with_its_rank_and_all_its_tokens() -> None:
    outcomes = pending(FIRST, SECOND)
    whole, none, one = (hit_in(outcomes, *tokens) for tokens in ((*PROPOSED, 10), (11,), (1, 1)))
    assert (whole.proposal.base_length, whole.proposal.token_ids, whole.rank) == (BASE + 4, (4, 7), 0)
    assert (none.proposal.base_length, none.proposal.token_ids, none.rank) == (BASE + 1, (5, 8), 1)
    assert (one.proposal.token_ids, one.rank) == ((6,), 2), "its branch ended after one token"
    assert whole.proposal.distributions == ()


def test_a_continuation_that_has_ended_has_the_tokens_before() -> None:
    """One text of a draft with another tokenizer may be fewer tokens than the others'."""
    came = (*PREFIX, *PROPOSED, 10)
    outcomes = pending(FIRST, replace(SECOND, token_ids=(-1, 8)))
    found = found_in(outcomes, *PROPOSED, 10)
    other = found_in(outcomes, 11)
    assert (found.token_ids, other.token_ids) == ((4,), (5, 8))
    assert isinstance(outcomes.outcome(came, 0.0), Hit), "it is done with it"
    with pytest.raises(ProtocolError, match="went on with a continuation that it had ended"):
        outcomes.add(DraftedOutcomes(BASE, 2, (3, 9)))
    assert isinstance(pending(replace(FIRST, token_ids=(-1, 5, 6))).outcome(came, 0.0), Miss), (
        "it has no token"
    )


def test_the_first_outcome_has_what_the_draft_is_ahead_with() -> None:
    came = (*PREFIX, *PROPOSED, 10)
    outcomes = pending(replace(FIRST, lead_token_ids=(7,)))
    found = found_in(outcomes, *PROPOSED, 10)
    other = found_in(outcomes, 11)
    assert (found.token_ids, other.token_ids) == ((4, 7), (5,))
    outcomes.add(replace(SECOND, lead_token_ids=(9,)))
    found = found_in(outcomes, *PROPOSED, 10)
    other = found_in(outcomes, 11)
    assert (found.token_ids, other.token_ids) == ((4, 7, 9), (5, 8))
    assert isinstance(outcomes.outcome(came, 0.0), Hit), "it is complete"
    outcomes.expect(BASE + 4, (4, 7, 9), BUDGET)
    assert isinstance(outcomes.outcome((*came, 4, 7, 9, 1), 0.0), Miss), "that was ahead of the last round"


def test_a_continuation_that_the_draft_still_drafts_says_when_its_next_token_is_due() -> None:
    outcomes = PendingOutcomes(VOCABULARY_SIZE, RowKind.TOKEN)
    outcomes.expect(BASE, PROPOSED, BUDGET)
    came = (*PREFIX, *PROPOSED, 10)
    outcomes.add(FIRST, 1.0)
    assert isinstance(outcomes.outcome(came, 1.1), Hit), "no step has been timed"
    outcomes.add(SECOND, 1.4)
    coming = outcomes.outcome(came, 1.5)
    assert isinstance(coming, Coming)
    assert (coming.ready, coming.max_tokens) == (2, BUDGET.token_count)
    assert (coming.due_seconds, coming.step_seconds) == pytest.approx((0.3, 0.4))
    assert [coming.seconds(count) for count in (1, 2, 3, 4)] == pytest.approx([0.0, 0.0, 0.3, 0.7])
    late = outcomes.outcome(came, 9.0)
    assert isinstance(late, Coming)
    assert late.due_seconds == 0.0
    assert isinstance(outcomes.outcome((*PREFIX, 1, 1), 1.5), Hit), "the draft gave it up after one token"
    assert isinstance(outcomes.outcome((*PREFIX, 2), 1.5), Miss), "the outcome was not drafted for"
    outcomes.add(DraftedOutcomes(BASE, 2, (9,)), 1.8)
    assert isinstance(outcomes.outcome(came, 1.9), Hit), "it is complete"
    outcomes.expect(BASE + 4, (4, 7, 9), BUDGET)
    assert isinstance(outcomes.outcome((*came, 4, 7, 9, 11), 2.0), Miss), "nothing has arrived in this round"


def test_distributions_come_with_their_tokens() -> None:
    supports = (support(4, 5), support(5), support(2, 6))
    first = replace(FIRST, distributions=supports)
    second = replace(SECOND, distributions=(support(7), support(8, 9, 1)))
    found = found_in(pending(first, second, kind=RowKind.SUPPORT), 11)
    assert found.distributions == (supports[1], second.distributions[1])


def test_a_round_is_awaited_only_if_it_has_a_budget() -> None:
    outcomes = pending()
    assert outcomes.awaits((*PREFIX, 10)), "even before the first push"
    assert outcomes.awaits((*PREFIX, *PROPOSED, 0))
    assert not outcomes.awaits((*PREFIX, 1, 2, 3, 4, 5)), "too many tokens for one round"
    assert not outcomes.awaits((*PREFIX, 3, 2)), "the proposal differs"
    assert not pending(budget=None).awaits((*PREFIX, 10))


def test_late_outcomes_are_tolerated_however_far_the_draft_is_behind() -> None:
    """Rounds of the target alone, or that it has begun by itself, end faster than a busy draft drafts ahead of them."""
    outcomes = PendingOutcomes(VOCABULARY_SIZE, RowKind.TOKEN)
    budgets = (8, 1, 8, 2)
    for number, count in enumerate(budgets):
        outcomes.expect(BASE + 2 * number, (5,), AheadBudget(4, count))
    outcomes.expect(BASE + 10, (), None)
    for number, count in enumerate(budgets):
        for depth in range(count):
            assert not outcomes.add(DraftedOutcomes(BASE + 2 * number, depth, (4,)))


def supported(*distributions: SparseDistribution, lead: tuple[int, ...] = ()) -> tuple[DraftedOutcomes, ...]:
    return (replace(FIRST, distributions=distributions, lead_token_ids=lead),)


OWN = tuple(support(token_id) for token_id in FIRST.token_ids)
WRONG: dict[str, tuple[tuple[DraftedOutcomes, ...], str]] = {
    "a round to come": ((replace(FIRST, base_length=BASE + 1),), "none were asked for there"),
    "a depth left out": ((SECOND,), "depth 0 must follow"),
    "a depth below 0": ((replace(FIRST, depth=-1),), "pushed depth -1"),
    "a depth twice": ((FIRST, FIRST), "pushed depth 0 of its outcomes; depth 1"),
    "more outcomes than granted": ((DraftedOutcomes(BASE, 0, (1,) * 5, (0,) * 5, (1, 2, 3, 4, 5)),),
        "pushed 5 tokens at depth 0; it must be 1 to 4"),
    "no outcome": ((DraftedOutcomes(BASE, 0, ()),), "pushed 0 tokens"),
    "more tokens than outcomes": ((FIRST, replace(SECOND, token_ids=(1, 2, 3, 4))),
        "pushed 4 tokens at depth 1; it must be 1 to 3"),
    "no names": ((DraftedOutcomes(BASE, 0, (1,)),), "named 0 outcomes with 1 tokens"),
    "names that come late": ((FIRST, replace(SECOND, accepted_counts=(0, 1), next_token_ids=(1, 2))),
        "named 2 outcomes with 2 tokens at depth 1; depth 0 alone names all"),
    "an outcome twice": ((DraftedOutcomes(BASE, 0, (1, 2), (0, 0), (5, 5)),), "drafted twice for one outcome"),
    "more accepted than proposed": ((DraftedOutcomes(BASE, 0, (1,), (4,), (5,)),),
        "drafted for 4 accepted tokens; there are 0 to 3"),
    "fewer than none accepted": ((DraftedOutcomes(BASE, 0, (1,), (-1,), (5,)),), "drafted for -1 accepted tokens"),
    "an unknown token": ((DraftedOutcomes(BASE, 0, (VOCABULARY_SIZE,), (0,), (5,)),),
        "drafted token id 12 ahead; ids must be in 0..11"),
    "an unknown next token": ((DraftedOutcomes(BASE, 0, (1,), (0,), (-1,)),), "drafted token id -1 ahead"),
    "more depths than granted": ((FIRST, SECOND, replace(SECOND, depth=2), replace(SECOND, depth=3)),
        "below the 3 that were granted"),
    "a lead of too many": (supported(lead=(7, 8, 9)),
        "it is 3 tokens ahead at depth 0 of its outcomes; 3 tokens were granted"),
    "a lead with an unknown token": (supported(lead=(VOCABULARY_SIZE,)), "it drafted token id 12 ahead"),
}  # fmt: skip
WRONG_SUPPORTS: dict[str, tuple[tuple[DraftedOutcomes, ...], str]] = {
    "a lead without distributions": (supported(*OWN, lead=(7,)),
        "by tokens without distributions; the rule needs one for each"),
    "none": (supported(), "pushed 3 tokens with 0 distributions; the rule needs one for each"),
    "too few": (supported(*OWN[:2]), "pushed 3 tokens with 2 distributions"),
    "without its token": (supported(OWN[0], OWN[0], OWN[2]), "to which its own distribution gives no probability"),
    "of an unknown token": (supported(OWN[0], support(5, VOCABULARY_SIZE), OWN[2]),
        "the probability of an unknown token"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "pushed", "sentence"),
    [
        pytest.param(kind, *case, id=name)
        for kind, wrong in ((RowKind.TOKEN, WRONG), (RowKind.SUPPORT, WRONG_SUPPORTS))
        for name, case in wrong.items()
    ],
)
def test_invalid_outcomes_are_refused(
    kind: RowKind, pushed: tuple[DraftedOutcomes, ...], sentence: str
) -> None:
    *before, lie = pushed
    outcomes = pending(*before, kind=kind)
    with pytest.raises(ProtocolError, match=f"^draft service: .*{sentence}"):
        outcomes.add(lie)


def test_supports_that_fill_the_memory_are_refused() -> None:
    """Each support alone is allowed; all of a round together are not."""
    vocabulary_size = 50_000
    wide = SparseDistribution(np.arange(vocabulary_size), np.full(vocabulary_size, 1.0 / vocabulary_size))
    outcomes = PendingOutcomes(vocabulary_size, RowKind.SUPPORT)
    outcomes.expect(BASE, PROPOSED, BUDGET)
    outcomes.add(DraftedOutcomes(BASE, 0, (4,), (0,), (1,), (wide,)))
    with pytest.raises(ProtocolError, match="supports of 100000 ids in one round"):
        outcomes.add(DraftedOutcomes(BASE, 1, (4,), distributions=(wide,)))
    outcomes.expect(BASE + 1, PROPOSED, BUDGET)
    outcomes.add(DraftedOutcomes(BASE + 1, 0, (4,), (0,), (1,), (wide,)))


def test_endless_outcomes_of_rounds_that_are_over_are_refused() -> None:
    outcomes = pending()
    outcomes.expect(BASE + 1, (5,), BUDGET)
    for _ in range(2 * BUDGET.token_count):
        outcomes.add(FIRST)
    with pytest.raises(ProtocolError, match="more messages of rounds that are over than it was granted"):
        outcomes.add(FIRST)


# ---- against a plain reference


@dataclass
class Reference:
    """Keeps everything that was pushed for the round in progress, by outcome."""

    base_length: int = 0
    proposed: tuple[int, ...] = ()
    continuations: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """The continuations by the tokens that follow the base."""

    def add(self, drafted: DraftedOutcomes) -> None:
        if drafted.base_length != self.base_length:
            return
        if drafted.depth == 0:
            self.continuations = {
                (*self.proposed[:accepted], token_id): []
                for accepted, token_id in zip(drafted.accepted_counts, drafted.next_token_ids, strict=True)
            }
        for own, token_id in zip(self.continuations.values(), drafted.token_ids, strict=False):
            own.append(token_id)

    def find(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        found = self.continuations.get(tuple(token_ids[self.base_length :]))
        return None if found is None else tuple(found)


small_ids = st.integers(0, 2)
"""Only three different tokens, so that outcomes share prefixes."""


@st.composite
def rounds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]], list[list[int]]]:
    """Draw a proposal, distinct outcomes of it, and the tokens of each depth, whose number never grows."""
    proposed = tuple(draw(st.lists(small_ids, max_size=3)))
    outcome = st.tuples(st.integers(0, len(proposed)), small_ids)
    keys = draw(st.lists(outcome, min_size=1, max_size=6, unique=True))
    columns = []
    width = len(keys)
    for depth in range(draw(st.integers(0, 3))):
        width = width if depth == 0 else draw(st.integers(1, width))
        columns.append(draw(st.lists(small_ids, min_size=width, max_size=width)))
    return proposed, keys, columns


@given(st.lists(rounds(), min_size=1, max_size=4), st.lists(st.lists(small_ids, max_size=5), max_size=6))
def test_outcomes_agree_with_a_plain_search(
    script: list[tuple[tuple[int, ...], list[tuple[int, int]], list[list[int]]]], others: list[list[int]]
) -> None:
    outcomes = PendingOutcomes(VOCABULARY_SIZE, RowKind.TOKEN)
    reference = Reference()
    length = 0
    last = DraftedOutcomes(0, 0, (1,), (0,), (1,))
    for number, (proposed, keys, columns) in enumerate(script):
        length += 1 + number
        outcomes.expect(length, proposed, AheadBudget(6, 3))
        reference.base_length = length
        reference.proposed = proposed
        reference.continuations = {}
        if number:
            outcomes.add(last)  # a late message of the previous round
        for depth, tokens in enumerate(columns):
            accepted = tuple(a for a, _ in keys) if depth == 0 else ()
            following = tuple(t for _, t in keys) if depth == 0 else ()
            last = DraftedOutcomes(length, depth, tuple(tokens), accepted, following)
            outcomes.add(last)
            reference.add(last)
            for tail in [*([*proposed[:a], t] for a, t in keys), *others, []]:
                token_ids = [0] * length + tail
                found = outcomes.outcome(token_ids, 0.0)
                proposal = found.proposal if isinstance(found, Hit | Coming) else None
                assert (None if proposal is None else proposal.token_ids) == reference.find(token_ids)
                assert proposal is None or proposal.base_length == len(token_ids)
                assert isinstance(found, Idle) != outcomes.awaits(token_ids)
