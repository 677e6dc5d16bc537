"""How far the draft works ahead of verifications, and how long to wait for what it made. Pure: no clock and no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from tandem.model.types import MAX_AHEAD_TOKENS, AheadBudget
from tandem_coordinator.speculation.gains import FIRST_MISSES

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


def best_count(
    counts: Iterable[int],
    expected: Sequence[float],
    seconds: Callable[[int], float],
    tokens_per_second: float,
) -> int:
    """The number of proposed tokens that is most worth its seconds.

    Args:
        counts: Numbers to choose from.
        expected: Expected tokens of a round with a proposal of 0, 1, ... tokens.
        seconds: What each number takes.
        tokens_per_second: What rounds make now.
    """
    return max(counts, key=lambda count: expected[count] - tokens_per_second * seconds(count))


def tokens_after_hit(expected: Sequence[float], unfinished: Unfinished, *, tokens_per_second: float) -> int:
    """How many tokens to wait for when the draft is still drafting the continuation of the outcome that came.

    `expected` has as many tokens as the round may have, `tokens_per_second` is what rounds make now.
    """
    ready, _, due_seconds, step_seconds = unfinished

    def waited(count: int) -> float:
        return due_seconds + (count - ready - 1) * step_seconds if count > ready else 0.0

    counts = range(ready, len(expected))
    return best_count(counts, expected, waited, tokens_per_second) if counts else ready
