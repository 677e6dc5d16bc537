"""The script of services without models: a fixed text, and a draft that is wrong at a fixed share of the positions.

Both services compute it from a position alone, so that they agree without a word and need no model.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_ID = 300
"""Lower ids are special tokens and single bytes, which are no characters on their own."""
_MULTIPLIER = 2654435761
"""Knuth's multiplicative hash (The Art of Computer Programming, volume 3, 6.4)."""


@dataclass(frozen=True, slots=True)
class Script:
    """A text of a target and the draft's guesses at it."""

    vocabulary_size: int
    """Ids are below it."""
    acceptance: float
    """Share of positions at which the draft is right."""

    def target_token(self, position: int) -> int:
        """The token at a position, counted from 0."""
        return _FIRST_ID + _hash(position) % (self.vocabulary_size - _FIRST_ID)

    def draft_token(self, position: int) -> int:
        """The draft's guess at it."""
        token_id = self.target_token(position)
        is_right = _hash(position + 7) % 1000 < 1000 * self.acceptance
        return token_id if is_right else _other(token_id, self.vocabulary_size)

    def support(self, position: int, size: int) -> tuple[int, ...]:
        """The draft's ids at a position, its guess first; the target's token is among them only where it is the guess.

        Args:
            position: Counted from 0.
            size: Number of ids.
        """
        guess, target = self.draft_token(position), self.target_token(position)
        ids = [guess]
        candidate = guess
        while len(ids) < size:
            candidate = _other(candidate, self.vocabulary_size)
            if candidate != target:
                ids.append(candidate)
        return tuple(ids)


def _hash(number: int) -> int:
    return (number * _MULTIPLIER & 0xFFFFFFFF) >> 8


def _other(token_id: int, vocabulary_size: int) -> int:
    return token_id + 1 if token_id + 1 < vocabulary_size else _FIRST_ID
