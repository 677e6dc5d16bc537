"""Proposals by outcome, and the delta with which a target goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.outcome_table import OutcomeTable
from tandem.model.types import Delta, DraftedOutcomes, RowKind, TokenRow, Verification, VerifyStep


def test_continuations_grow_depth_by_depth() -> None:
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7, 8), (2, 0), (5, 6), lead_token_ids=(9,)))
    assert (table.find(4, 2, 5), table.find(4, 0, 6)) == ((7, 9), (8,))
    assert table.add(DraftedOutcomes(4, 1, (9,), lead_token_ids=(10, 11)))
    assert table.find(4, 2, 5) == (7, 9, 10, 11)
    assert table.find(4, 0, 6) == (8,), "it was given up"
    assert table.add(DraftedOutcomes(4, 2, (-1, 3)))
    assert table.find(4, 2, 5) == (7, 9, 10, 11), "it has ended"
    assert table.find(4, 0, 5) == table.find(3, 2, 5) == table.find(5, 2, 5) == ()


def test_another_round_replaces_the_last_one() -> None:
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,)))
    assert not table.add(DraftedOutcomes(6, 1, (8,))), "its first depth is missing"
    assert table.find(4, 0, 5) == (7,)
    assert table.add(DraftedOutcomes(6, 0, (8,), (1,), (5,)))
    assert not table.add(DraftedOutcomes(4, 1, (9,)))
    assert (table.find(4, 0, 5), table.find(6, 1, 5)) == ((), (8,))


def test_a_lost_depth_ends_a_continuation() -> None:
    """Otherwise the target would read one token where the coordinator, which has all of them, reads another."""
    table = OutcomeTable()
    assert table.add(DraftedOutcomes(4, 0, (7, 8), (2, 0), (5, 6)))
    table.add(DraftedOutcomes(4, 2, (9, 10)))
    assert (table.find(4, 2, 5), table.find(4, 0, 6)) == ((7,), (8,))


@pytest.mark.parametrize(
    ("fewest", "room", "suffices"), [(0, 9, True), (2, 9, True), (3, 9, False), (3, 2, True)]
)
def test_a_target_goes_on_with_enough_tokens(fewest: int, room: int, suffices: bool) -> None:
    table = OutcomeTable()
    table.ask(VerifyStep(Delta(3, (0,)), RowKind.TOKEN, 1, lead=1, min_proposed=fewest))
    table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,), lead_token_ids=(8,)))
    assert table.suffices(4, 0, 5, room) is suffices
    assert table.suffices(4, 0, 6, room) is table.suffices(9, 0, 5, room) is (fewest == 0)


@pytest.mark.parametrize("alone", [False, True])
def test_it_goes_on_alone_only_behind_an_outcome_that_was_not_drafted_for(alone: bool) -> None:
    table = OutcomeTable()
    table.ask(VerifyStep(Delta(3, (0,)), RowKind.TOKEN, 1, lead=1, min_proposed=3, alone_after_miss=alone))
    assert not table.suffices(4, 0, 5, 9), "nothing is known of the round yet"
    table.add(DraftedOutcomes(4, 0, (7,), (0,), (5,)))
    assert not table.suffices(4, 0, 5, 9), "more tokens may come"
    assert table.suffices(4, 0, 6, 9) is alone


IDS = st.integers(0, 5)


@given(
    rows=st.lists(IDS, min_size=1, max_size=5),
    proposed=st.lists(IDS, max_size=4),
    following=st.lists(IDS, max_size=4),
    ends=st.sets(IDS, max_size=2),
    room=st.integers(1, 12),
)
def test_a_target_goes_on_behind_its_own_outcome_within_the_sequence(
    rows: list[int], proposed: list[int], following: list[int], ends: set[int], room: int
) -> None:
    base, proposed = 10, proposed[: len(rows) - 1]
    rows = rows[: len(proposed) + 1]
    step = VerifyStep(Delta(base - 1, (0, *proposed)), RowKind.TOKEN, len(rows), lead=1)
    answer = Verification(base, tuple(map(TokenRow, rows)))
    asked = []

    def proposal(*outcome: int) -> list[int]:
        asked.append(outcome)
        return following

    delta = step.led_delta(answer, ends, base + room, proposal)
    accepted = next((i for i, own in enumerate(proposed) if own != rows[i]), len(proposed))
    committed = rows[: accepted + 1]
    if ends.intersection(committed) or room <= len(committed):
        assert delta is None
        return
    assert asked == [(base, accepted, rows[accepted])]
    assert delta is not None
    assert (delta.base_length, delta.token_ids[0]) == (base + accepted, rows[accepted])
    assert list(delta.token_ids[1:]) == following[: room - len(committed) - 1], "one token more has room"


def test_a_target_does_not_go_on_where_it_may_not() -> None:
    answer = Verification(3, (TokenRow(1),))
    for step in (
        VerifyStep(Delta(2, (0,)), RowKind.TOKEN, 1),
        VerifyStep(Delta(2, (0,)), RowKind.SUPPORT, 1, lead=2),
        VerifyStep(Delta(2, (0,)), RowKind.DENSE, 1, lead=2),
    ):
        assert step.led_delta(answer, (), 20, lambda *_: ()) is None
