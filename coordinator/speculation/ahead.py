"""How far the draft works ahead of verifications, and how long to wait for what it made. Pure: no clock and no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from coordinator.speculation.gains import FIRST_MISSES
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget

DraftAhead = Literal["auto", "off"] | int
"""auto: as far as it pays; off: not at all; a number: always for so many outcomes."""
OUTCOMES = tuple(1 << place for place in range(len(FIRST_MISSES)))
"""Numbers of outcomes to choose from: those whose hit rates are guessed."""


def outcome_choices(option: DraftAhead) -> tuple[int, ...]:
    """The numbers of outcomes that rounds may draft ahead for; 0: not ahead."""
    if isinstance(option, int):
        return (option,)
    return (0, *OUTCOMES) if option == "auto" else (0,)


def max_budget(option: DraftAhead, max_tokens: int) -> AheadBudget | None:
    """The most that any round will grant; None for nothing."""
    most = outcome_choices(option)[-1]
    return AheadBudget(most, min(max_tokens, MAX_AHEAD_TOKENS)) if most else None


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
        wait_seconds: Of asking the draft, beside its steps: messages, and the step of branches that it is at.
        tokens_per_second: What rounds make now.
    """

    def advantage(count: int) -> float:
        waited = wait_seconds + count * draft_seconds if count else 0.0
        return expected[count] - tokens_per_second * (waited + verify_seconds[count])

    return max(counts, key=advantage)
