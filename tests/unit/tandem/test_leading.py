"""What a target goes on with: outcomes of rounds, and the sources of the proposals behind them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.leading import Leading, OutcomeTable, Pushed, RoundOutcome, decided_outcome, read_outcome
from tandem.model.types import (
    Acceptance,
    Delta,
    DraftedOutcomes,
    GoesOn,
    NextToken,
    Proposal,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)


def outcome(base_length: int, accepted_count: int, next_token_id: int) -> RoundOutcome:
    return RoundOutcome(base_length, (*[0] * accepted_count, next_token_id))


def options(max_length: int, *ends: int) -> TargetOptions:
    return TargetOptions("r", SamplingParams(), max_length, end_token_ids=ends)


def test_continuations_grow_depth_by_depth() -> None:
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7, 8), (2, 0), (5, 6), lead_token_ids=(9,)))
    assert (table.find(outcome(4, 2, 5)), table.find(outcome(4, 0, 6))) == ((7, 9), (8,))
    assert table.add(DraftedOutcomes(4, 1, (9,), lead_token_ids=(10, 11)))
    assert table.find(outcome(4, 2, 5)) == (7, 9, 10, 11)
    assert table.find(outcome(4, 0, 6)) == (8,), "it was given up"
    assert table.add(DraftedOutcomes(4, 2, (-1, 3)))
    assert table.find(outcome(4, 2, 5)) == (7, 9, 10, 11), "it has ended"
    for other in (outcome(4, 0, 5), outcome(3, 2, 5), outcome(5, 2, 5)):
        assert table.find(other) == ()


def test_another_round_replaces_the_last_one() -> None:
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,)))
    assert not table.add(DraftedOutcomes(6, 1, (8,))), "its first depth is missing"
    assert table.find(outcome(4, 0, 5)) == (7,)
    assert table.add(DraftedOutcomes(6, 0, (8,), (1,), (5,)))
    assert not table.add(DraftedOutcomes(4, 1, (9,)))
    assert (table.find(outcome(4, 0, 5)), table.find(outcome(6, 1, 5))) == ((), (8,))


def test_a_lost_depth_ends_a_continuation() -> None:
    """Otherwise the target would read one token where the coordinator, which has all of them, reads another."""
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7, 8), (2, 0), (5, 6)))
    table.add(DraftedOutcomes(4, 2, (9, 10)))
    assert (table.find(outcome(4, 2, 5)), table.find(outcome(4, 0, 6))) == ((7,), (8,))


@pytest.mark.parametrize(
    ("fewest", "room", "suffices"), [(0, 9, True), (2, 9, True), (3, 9, False), (3, 2, True)]
)
def test_a_target_goes_on_with_enough_tokens(fewest: int, room: int, suffices: bool) -> None:
    table = OutcomeTable()
    pushed = Pushed(table, fewest)
    table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,), lead_token_ids=(8,)))
    expected = GoesOn(Delta(4, (5, 7, 8))) if suffices else None
    assert pushed.find(outcome(4, 0, 5), room) == expected
    for unknown in (outcome(4, 0, 6), outcome(9, 0, 5)):
        alone = GoesOn(Delta(unknown.base_length, (unknown.next_token_id,)))
        assert pushed.find(unknown, room) == (None if fewest else alone)


@pytest.mark.parametrize("alone", [False, True])
def test_it_goes_on_alone_only_behind_an_outcome_that_was_not_drafted_for(alone: bool) -> None:
    table = OutcomeTable()
    pushed = Pushed(table, 3, alone)
    assert pushed.find(outcome(4, 0, 5), 9) is None, "nothing is known of the round yet"
    table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,)))
    assert pushed.find(outcome(4, 0, 5), 9) is None, "more tokens may come"
    assert (pushed.find(outcome(4, 0, 6), 9) is not None) is alone


def test_its_own_head_proposes_as_many_as_the_last_step_said() -> None:
    leading = Leading()
    for count in (4, 2):
        leading.ask(VerifyStep(Delta(3, (0,)), RowKind.SUPPORT, 1, lead=2, own_tokens=count))
        goes_on = leading.find(outcome(4, 2, 5), options(20))
        assert goes_on == GoesOn(Delta(6, (5,)), count)
        led = leading.step(goes_on, 2)
        assert (led.delta, led.row_kind, led.row_count) == (Delta(6, (5,)), RowKind.SUPPORT, 1)
        assert (led.lead, led.own_tokens) == (2, count)
    leading.ask(VerifyStep(Delta(3, (0,)), RowKind.TOKEN, 1, lead=1))
    goes_on = leading.find(outcome(4, 2, 5), options(20))
    assert goes_on == GoesOn(Delta(6, (5,))), "the target alone"
    assert leading.step(goes_on, 1) == VerifyStep(Delta(6, (5,)), RowKind.TOKEN, 1, lead=1)


IDS = st.integers(0, 5)


@given(
    rows=st.lists(IDS, min_size=1, max_size=5),
    proposed=st.lists(IDS, max_size=4),
    following=st.lists(IDS, max_size=4),
    ends=st.sets(IDS, max_size=2),
    room=st.integers(1, 12),
    own=st.booleans(),
)
def test_a_target_goes_on_behind_its_own_outcome_within_the_sequence(
    rows: list[int], proposed: list[int], following: list[int], ends: set[int], room: int, own: bool
) -> None:
    base = 10
    proposed = proposed[: len(rows) - 1]
    rows = rows[: len(proposed) + 1]
    accepted = next((i for i, each in enumerate(proposed) if each != rows[i]), len(proposed))
    answer = Verification(base, tuple(map(TokenRow, rows)))
    leading = Leading()
    if own:
        step = VerifyStep(Delta(base - 1, (0,)), RowKind.TOKEN, 1, lead=1, own_tokens=3)
        decided = Acceptance(accepted, rows[accepted], NextToken.RECOVERED)
        found = decided_outcome(answer, Proposal(base, tuple(proposed)), decided)
    else:
        step = VerifyStep(Delta(base - 1, (0, *proposed)), RowKind.TOKEN, len(rows), lead=1)
        found = read_outcome(step, answer)
        for depth, token_id in enumerate(following):
            leading.add(DraftedOutcomes(base, depth, (token_id,), (accepted,), (rows[accepted],)))
    leading.ask(step)
    goes_on = leading.find(found, options(base + room, *ends))
    committed = rows[: accepted + 1]
    assert found == RoundOutcome(base, tuple(committed))
    if ends.intersection(committed) or room <= len(committed):
        assert goes_on is None
        return
    assert goes_on is not None
    assert (goes_on.delta.base_length, goes_on.delta.token_ids[0]) == (base + accepted, rows[accepted])
    given_tokens = [] if own else following[: room - len(committed) - 1]
    assert list(goes_on.delta.token_ids[1:]) == given_tokens, "one token more has room"
    assert goes_on.own_tokens == (3 if own else None)


def test_a_target_does_not_go_on_where_it_may_not() -> None:
    answer = Verification(3, (TokenRow(1),))
    for step in (
        VerifyStep(Delta(2, (0,)), RowKind.TOKEN, 1),
        VerifyStep(Delta(2, (0,)), RowKind.SUPPORT, 1, lead=2),
        VerifyStep(Delta(2, (0,)), RowKind.DENSE, 1, lead=2),
    ):
        assert read_outcome(step, answer) is None
    assert decided_outcome(answer, Proposal(3), None) is None
    assert decided_outcome(answer, Proposal(3), Acceptance(0, -1, NextToken.NONE)) is None
    assert Leading().find(None, options(20)) is None
