"""Recognises the sequences of vLLM's batch from one step to the next, by their tokens alone. No clock and no I/O.

vLLM swaps and condenses the rows of its batch between steps and hands no request's name to a proposer. Committed tokens
never change, so a row continues a known sequence if and only if it begins with that sequence's tokens. Which of two
equal sequences a row continues makes no difference to what may follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

ABSENT_STEPS = 3
"""A sequence without a row in so many consecutive steps has ended, or was preempted for long."""


class KnownSequence:
    """A sequence that had a row."""

    def __init__(self, key: int, tokens: IntArray) -> None:
        self.key = key
        """Names it, once and for all."""
        self.length = 0
        self.absent_steps = 0
        self.proposed = 0
        """Tokens proposed for it in the last step that it had a row in."""
        self._buffer: IntArray = np.empty(2 * len(tokens), np.int32)
        self.extend(tokens)

    @property
    def token_ids(self) -> IntArray:
        """The sequence's tokens, shape [length]."""
        return self._buffer[: self.length]

    def extend(self, tokens: IntArray) -> None:
        """Add tokens at the end."""
        length = self.length + len(tokens)
        if length > len(self._buffer):
            grown = np.empty(2 * length, np.int32)
            grown[: self.length] = self.token_ids
            self._buffer = grown
        self._buffer[self.length : length] = tokens
        self.length = length

    def is_prefix_of(self, tokens: IntArray) -> bool:
        """True if the tokens begin with its own."""
        length = self.length
        if length > len(tokens) or (length and tokens[length - 1] != self._buffer[length - 1]):
            return False
        return bool(np.array_equal(tokens[:length], self.token_ids))


@dataclass(frozen=True, slots=True)
class RecognisedRow:
    """A row of the batch and the sequence that it is."""

    sequence: KnownSequence
    new_tokens: tuple[int, ...]
    """Tokens since the sequence was last seen; all of them for one that is new."""
    is_new: bool


class SequenceTable:
    """The sequences of the last steps. Holds at most those with a row in one of the last `ABSENT_STEPS` + 1 steps."""

    def __init__(self) -> None:
        self._rows: list[KnownSequence] = []
        """Sequences by their row in the last step."""
        self._absent: list[KnownSequence] = []
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._rows) + len(self._absent)

    def recognise(self, rows: Sequence[IntArray]) -> list[RecognisedRow]:
        """The sequence of each row, which from now on has the row's tokens.

        Args:
            rows: Tokens of each row, int32, shape [length of the sequence].
        """
        unclaimed: dict[int, KnownSequence] = {each.key: each for each in (*self._rows, *self._absent)}
        found: list[KnownSequence | None] = [None] * len(rows)
        # Most rows are where they were, and comparing tokens once is enough for them.
        for index, (known, tokens) in enumerate(zip(self._rows, rows, strict=False)):
            if known.is_prefix_of(tokens):
                found[index] = unclaimed.pop(known.key)
        for index, tokens in enumerate(rows):
            if found[index] is None and unclaimed:
                longest = _longest_prefix(unclaimed.values(), tokens)
                found[index] = None if longest is None else unclaimed.pop(longest.key)
        recognised = [self._row(known, tokens) for known, tokens in zip(found, rows, strict=True)]
        self._rows = [row.sequence for row in recognised]
        self._absent = list(unclaimed.values())
        for known in self._absent:
            known.absent_steps += 1
        return recognised

    def take_ended(self) -> list[KnownSequence]:
        """The sequences that are taken to have ended, each told once."""
        ended = [known for known in self._absent if known.absent_steps >= ABSENT_STEPS]
        self._absent = [known for known in self._absent if known.absent_steps < ABSENT_STEPS]
        return ended

    def _row(self, known: KnownSequence | None, tokens: IntArray) -> RecognisedRow:
        if known is None:
            self._next_key += 1
            known = KnownSequence(self._next_key, tokens)
            return RecognisedRow(known, tuple(tokens.tolist()), is_new=True)
        new_tokens = tokens[known.length :]
        known.extend(new_tokens)
        known.absent_steps = 0
        return RecognisedRow(known, tuple(new_tokens.tolist()), is_new=False)


def _longest_prefix(known: Iterable[KnownSequence], tokens: IntArray) -> KnownSequence | None:
    candidates = [each for each in known if each.is_prefix_of(tokens)]
    return max(candidates, key=lambda each: each.length, default=None)
