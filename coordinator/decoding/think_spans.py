"""Think spans: the tokens between a model's think markers, where relaxed acceptance applies."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

THINK_START = "<think>"
THINK_END = "</think>"
"""The markers that reasoning models share."""


class ThinkSpans:
    """Follows one completion through its think spans."""

    def __init__(self, start_id: int, end_id: int) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self._followed = 0
        self._is_inside = False

    def inside(self, committed: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """For each proposed token, whether it lies inside a think span. The marker that ends a span belongs to it.

        Args:
            committed: Prompt and committed tokens; the call reads only those added since the last one.
            proposed: The tokens that may follow them.
        """
        for token_id in committed[self._followed :]:
            self._is_inside = self._after(self._is_inside, token_id)
        self._followed = len(committed)
        states = [self._is_inside]
        for token_id in proposed[:-1]:
            states.append(self._after(states[-1], token_id))
        return states[: len(proposed)]

    def _after(self, is_inside: bool, token_id: int) -> bool:
        return token_id != self._end_id and (is_inside or token_id == self._start_id)


def think_spans(tokenizer: Tokenizer) -> ThinkSpans | None:
    """Spans between the tokenizer's think markers; None when it has no such markers."""
    start_id, end_id = tokenizer.token_to_id(THINK_START), tokenizer.token_to_id(THINK_END)
    return None if start_id is None or end_id is None else ThinkSpans(start_id, end_id)
