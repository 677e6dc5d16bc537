"""Pending outcomes find what a plain search over all pushed outcomes finds (property test)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from coordinator.transport.draft_client import PendingOutcomes
from tandem.types import AheadBudget, DraftedOutcomes, RowKind

VOCABULARY_SIZE = 12


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
    columns, width = [], len(keys)
    for depth in range(draw(st.integers(0, 3))):
        width = width if depth == 0 else draw(st.integers(1, width))
        columns.append(draw(st.lists(small_ids, min_size=width, max_size=width)))
    return proposed, keys, columns


@given(st.lists(rounds(), min_size=1, max_size=4), st.lists(st.lists(small_ids, max_size=5), max_size=6))
def test_outcomes_agree_with_a_plain_search(
    script: list[tuple[tuple[int, ...], list[tuple[int, int]], list[list[int]]]], others: list[list[int]]
) -> None:
    outcomes, reference = PendingOutcomes(VOCABULARY_SIZE, RowKind.TOKEN), Reference()
    length, last = 0, DraftedOutcomes(0, 0, (1,), (0,), (1,))
    for number, (proposed, keys, columns) in enumerate(script):
        length += 1 + number
        outcomes.expect(length, proposed, AheadBudget(6, 3))
        reference.base_length, reference.proposed, reference.continuations = length, proposed, {}
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
                found = outcomes.find(token_ids)
                assert (None if found is None else found.token_ids) == reference.find(token_ids)
                assert found is None or found.base_length == len(token_ids)
                assert found is None or outcomes.awaits(token_ids)
