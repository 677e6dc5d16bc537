"""Deltas carry the difference, and the service always ends up with the coordinator's sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.transport.remote_sequence import RemoteSequence
from tandem.types import Delta


def applied(tokens: list[int], delta: Delta) -> list[int]:
    assert delta.base_length <= len(tokens), "a delta must not leave a gap"
    return [*tokens[: delta.base_length], *delta.token_ids]


def test_all_accepted_sends_only_the_bonus_token_and_the_next_proposal() -> None:
    remote = RemoteSequence()
    assert remote.delta_to([1, 2, 3], [4, 5]) == Delta(0, [1, 2, 3, 4, 5])
    assert remote.delta_to([1, 2, 3, 4, 5, 6], [7]) == Delta(5, [6, 7])


def test_a_rejection_keeps_the_accepted_tokens() -> None:
    remote = RemoteSequence()
    remote.delta_to([1, 2, 3], [4, 5])
    assert remote.delta_to([1, 2, 3, 4, 9], [8]) == Delta(4, [9, 8])


def test_repeating_a_step_changes_nothing() -> None:
    remote = RemoteSequence()
    remote.delta_to([1, 2], [3, 4])
    assert remote.delta_to([1, 2], [3, 4]) == Delta(4, [])
    assert remote.delta_to([1, 2, 9]) == Delta(2, [9]), "a repeated proposal is still only a proposal"


def test_kept_tokens_are_those_that_the_service_holds_and_that_were_committed() -> None:
    remote = RemoteSequence()
    remote.delta_to([1, 2, 3], [4, 5])
    assert remote.kept_length([1, 2, 3, 4, 9]) == 4
    assert remote.kept_length([1, 2, 3, 4, 5, 6]) == 5
    assert remote.kept_length([1, 2, 3]) == 3


rounds = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4),  # the proposal
        st.integers(0, 4),  # how much of it is accepted
        st.integers(0, 2),  # the token after it
        st.booleans(),  # True if the service proposed it, and so has it outside the sequence
    ),
    max_size=12,
)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), rounds)
def test_the_service_always_holds_the_coordinators_sequence(
    prompt: list[int], script: list[tuple[list[int], int, int, bool]]
) -> None:
    remote, committed = RemoteSequence(), list(prompt)
    held: list[int] = []
    for proposal, accepted, next_token, by_service in script:
        if by_service:
            held = applied(held, remote.delta_to(committed))
            assert held == committed
        else:
            held = applied(held, remote.delta_to(committed, proposal))
            assert held == committed + proposal
        committed += [*proposal[:accepted], next_token]
