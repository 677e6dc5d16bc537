"""Sizes for which a step is recorded: a recording has fixed shapes, and smaller work is padded to the next one."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

_SHORTEST = 512
"""Below this many keys, reading all of them costs nothing beside the weights."""

_GROWTH = 4
"""Factor from one length to the next. Padding reads keys in vain, but keys are few bytes beside the weights."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a recorded step."""

    sequences: int
    width: int
    """Tokens of each sequence."""
    length: int
    """Keys that each token may see."""

    @property
    def token_count(self) -> int:
        """Tokens in all."""
        return self.sequences * self.width

    def holds(self, sequences: int, width: int, length: int) -> bool:
        """True if work of this size fits in."""
        return sequences <= self.sequences and width <= self.width and length <= self.length


def make_buckets(max_sequences: int, max_length: int, widths: Iterable[int]) -> tuple[Bucket, ...]:
    """The buckets of an engine, smallest first.

    Args:
        max_sequences: Maximum sequences in a step.
        max_length: Longest sequence, in tokens.
        widths: Tokens of each sequence in a step; each width has buckets.
    """
    counts = _up_to(1, max_sequences, _GROWTH)
    lengths = _up_to(min(_SHORTEST, max_length), max_length, _GROWTH)
    return tuple(Bucket(count, width, length)
                 for count in counts for width in sorted(set(widths)) for length in lengths)  # fmt: skip


def smallest(buckets: SequenceOf[Bucket], sequences: int, width: int, length: int) -> Bucket | None:
    """The first bucket that holds work of this size; None when none does."""
    return next((bucket for bucket in buckets if bucket.holds(sequences, width, length)), None)


def _up_to(first: int, last: int, factor: int) -> list[int]:
    """`first`, its multiples by powers of `factor`, and `last`."""
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= factor
    return [*values, last]
