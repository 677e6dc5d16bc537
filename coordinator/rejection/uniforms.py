"""The random numbers of one round, drawn before its rule runs, and the two ways to choose a token with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import numpy as np

from tandem.sampling.noise import Purpose, recovery_keys, sample, target_keys, uniform
from tandem.types import FloatArray, IntArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent random numbers, uniform on the open interval (0, 1), and the keys of more."""

    accept: Sequence[float] | FloatArray
    """Decides on each proposed token, K of them."""
    recover: Sequence[float] | FloatArray
    """Chooses the token after the accepted run by inversion, K + 1 of them: entry i when i tokens were accepted."""
    recovery_keys: Sequence[int] | IntArray
    """Keys of the noise that samples the same token, K + 1 of them, signed 64-bit. A round uses one of these, or one of
    `recover`."""

    def part(self, start: int, stop: int) -> Uniforms:
        """Return the numbers for the tokens from `start` to before `stop`, and for the one after them."""
        following = slice(start, stop + 1)
        return Uniforms(self.accept[start:stop], self.recover[following], self.recovery_keys[following])

    def sample(self, index: int, token_ids: IntArray, weights: FloatArray) -> int:
        """Sample the token after `index` accepted ones in proportion to the weights, with the recovery keys.

        The sample is the argmax of weight / exponential with independent exponentials (see
        `tandem.sampling.noise.sample`). An argmax over all tokens is the argmax over the argmaxes of any parts, so
        that one token can stand for a part of the vocabulary.

        Args:
            index: Number of accepted tokens.
            token_ids: The candidates, int64 [N].
            weights: Their weights, not negative, float64 [N].

        Returns:
            The sampled id; -1 when the sum of the weights is not a positive number.
        """
        if not token_ids.size:
            return -1
        key = np.array([self.recovery_keys[index]], dtype=np.int64)
        # A single candidate, such as the target's sample after the proposal, needs no noise.
        column = int(sample(weights[None, :], key, token_ids)[0]) if token_ids.size > 1 else 0
        # If all weights are zero or one is NaN, the argmax lands on such a weight.
        return int(token_ids[column]) if 0.0 < weights[column] < math.inf else -1


NO_UNIFORMS = Uniforms(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
"""For rules that need no random numbers: drawing them would cost more than the rule itself."""


def draw_uniforms(seed: int, base_length: int, token_count: int) -> Uniforms:
    """Draw the random numbers of the round that proposes `token_count` tokens after `base_length` ones.

    Their keys include the base length as well as the position, which makes them exact for every rule (see
    `tandem.sampling.noise`). A repeated round draws the same numbers. For an empty proposal the keys are the
    target's, so that its own sample results from every kind of row.
    """
    count = token_count + 1
    keys_of = recovery_keys if token_count else target_keys
    return Uniforms(
        _Drawn(token_count, lambda i: uniform(seed, base_length + i, Purpose.ACCEPTANCE, base_length)),
        _Drawn(count, lambda i: uniform(seed, base_length + i, Purpose.RECOVERY, base_length)),
        _Drawn(count, lambda i: int(keys_of(seed, base_length, i + 1)[i])),
    )


class _Drawn(Sequence[T], Generic[T]):
    """Numbers that are drawn when somebody reads them: a round reads few of them, and each takes a microsecond."""

    def __init__(self, count: int, draw: Callable[[int], T]) -> None:
        self._count = count
        self._draw = draw

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._draw(i) for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(f"number {index} of {self._count}")
        return self._draw(index)


def invert(weights: FloatArray, outside_mass: float, uniform: float) -> int:
    """Choose in proportion to the weights by inverting their cumulative sum, the outside last.

    Args:
        weights: Not negative, float64 [N].
        outside_mass: Weight of everything else.
        uniform: The random number that is inverted.

    Returns:
        The index of a weight, N for the outside; -1 when the sum of the weights is not a positive number.
    """
    cumulative = weights.cumsum()
    inside_mass = float(cumulative[-1]) if cumulative.size else 0.0
    total = inside_mass + outside_mass
    if not 0.0 < total < math.inf:
        return -1
    point = uniform * total
    if point >= inside_mass and outside_mass > 0.0:
        return int(weights.size)
    if point < inside_mass:
        return int(cumulative.searchsorted(point, "right"))
    # The product was rounded up to the total: choose the last positive weight, not what follows it.
    return int(cumulative.searchsorted(inside_mass, "left"))
