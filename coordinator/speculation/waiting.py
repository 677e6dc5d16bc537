"""How long a round that drafts ahead waits for its proposal.

Each token is worth its wait while it is expected to bring more than the same time brings otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Unfinished(NamedTuple):
    """A continuation that the draft is still drafting."""

    ready: int
    """Tokens that are there."""
    max_tokens: int
    """Tokens that it will have."""
    due_seconds: float
    """Seconds until the next token is expected."""
    step_seconds: float
    """Seconds from one token to the next."""


def tokens_after_hit(expected: Sequence[float], unfinished: Unfinished, *, tokens_per_second: float) -> int:
    """How many tokens to wait for when the draft is still drafting the continuation of the outcome that came.

    Args:
        expected: Expected tokens of a round with a proposal of 0, 1, ... tokens, as many as it may have.
        unfinished: The continuation.
        tokens_per_second: What rounds make now.
    """
    ready, _, due_seconds, step_seconds = unfinished

    def advantage(count: int) -> float:
        waited = due_seconds + (count - ready - 1) * step_seconds if count > ready else 0.0
        return expected[count] - tokens_per_second * waited

    return max(range(ready, len(expected)), key=advantage, default=ready)


def tokens_after_miss(
    expected: Sequence[float],
    verify_seconds: Sequence[float],
    *,
    counts: Iterable[int],
    draft_seconds: float,
    wait_seconds: float,
    tokens_per_second: float,
) -> int:
    """How many tokens to ask for when another outcome came than those that were drafted for; 0: the target goes on.

    Args:
        expected: Expected tokens of a round with a proposal of 0, 1, ... tokens.
        verify_seconds: Of a verification of as many.
        counts: Numbers of tokens to choose from.
        draft_seconds: Of a draft step.
        wait_seconds: Of asking the draft, beside its steps: messages, and the step of branches that it is at.
        tokens_per_second: What rounds make now.
    """

    def advantage(count: int) -> float:
        waited = wait_seconds + count * draft_seconds if count else 0.0
        return expected[count] - tokens_per_second * (waited + verify_seconds[count])

    return max(counts, key=advantage)
