"""Sizes for which a step is captured: a graph has fixed shapes, and smaller work is padded to the next one."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

_GROWTH = 4
"""Factor from one number of sequences to the next. Padding computes in vain, but weights are read once for all."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a captured step. Sequences of any length fit in: attention reads their lengths on the device."""

    sequences: int
    width: int
    """Tokens of each sequence."""

    def __str__(self) -> str:
        return f"{self.sequences} x {self.width}"

    @property
    def token_count(self) -> int:
        """Tokens in all."""
        return self.sequences * self.width

    def holds(self, sequences: int, width: int) -> bool:
        """True if work of this size fits in."""
        return sequences <= self.sequences and width <= self.width


def make_buckets(max_sequences: int, widths: Iterable[int]) -> tuple[Bucket, ...]:
    """The buckets of an engine, smallest first.

    Args:
        max_sequences: Maximum sequences in a step.
        widths: Tokens of each sequence in a step; each width has buckets.
    """
    return tuple(Bucket(count, width)
                 for count in _up_to(max_sequences) for width in sorted(set(widths)))  # fmt: skip


def smallest(buckets: SequenceOf[Bucket], sequences: int, width: int) -> Bucket | None:
    """The first bucket that holds work of this size; None when none does."""
    return next((bucket for bucket in buckets if bucket.holds(sequences, width)), None)


def _up_to(last: int) -> list[int]:
    """One, its multiples by powers of the growth, and `last`."""
    values = []
    value = 1
    while value < last:
        values.append(value)
        value *= _GROWTH
    return [*values, last]
