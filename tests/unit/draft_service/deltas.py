"""Deltas as a coordinator may send them: growth, rollback, repetition, and now and then the whole sequence anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hypothesis import strategies as st

from draft_service.proposers.model_free import TokenIndex, TokenState
from tandem.types import Delta

IndexT = TypeVar("IndexT", bound=TokenIndex)

# Few different tokens, so that they repeat; and runs of a period, as code and tables have them.
tokens = st.one_of(
    st.lists(st.integers(0, 2), max_size=12),
    st.builds(
        lambda period, times: period * times,
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.integers(1, 5),
    ),
)
scripts = st.lists(st.tuples(st.integers(0, 10), tokens), min_size=1, max_size=8)
"""For each delta, how many of the present tokens it sends again or replaces, and what it sends."""


class Held(Generic[IndexT]):
    """An index and its tokens, changed as a sequence changes them."""

    def __init__(self, new_index: Callable[[TokenState], IndexT], max_length: int = 0) -> None:
        self.state = TokenState(max_length)
        self.index = new_index(self.state)

    @property
    def tokens(self) -> list[int]:
        return list(self.state.token_ids)

    def apply(self, delta: Delta) -> None:
        kept = self.state.kept_length(delta)
        if kept < len(self.state):
            self.index.forget(kept)
        self.state.apply(delta, kept)
        for _ in self.index.learn():
            pass

    def propose(self, token_count: int) -> list[int]:
        return list(self.index.propose(token_count))

    def finish(self) -> None:
        for _ in self.index.finish():
            pass


def script_to_deltas(script: Sequence[tuple[int, Sequence[int]]]) -> list[Delta]:
    """The deltas of a script."""
    length, deltas = 0, []
    for back, token_ids in script:
        delta = Delta(max(0, length - back), token_ids)
        length = delta.length
        deltas.append(delta)
    return deltas
