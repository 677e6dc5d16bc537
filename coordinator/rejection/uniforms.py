"""The random numbers of one round, drawn before its rule runs, and the two ways to choose a token with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tandem.sampling.noise import Purpose, recovery_keys, sample, target_keys, uniform
from tandem.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent random numbers, uniform on the open interval (0, 1), and the keys of more."""

    accept: FloatArray
    """Decides on each proposed token, shape [K]."""
    recover: FloatArray
    """Chooses the token after the accepted run by inversion, shape [K + 1]: entry i when i tokens were accepted."""
    recovery_keys: IntArray
    """Keys of the noise that samples the same token, int64 [K + 1]. A round uses either these or `recover`."""

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
        key = self.recovery_keys[index : index + 1]
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
    accept, recover = (
        [uniform(seed, base_length + i, purpose, base_length) for i in range(count)]
        for purpose, count in ((Purpose.ACCEPTANCE, token_count), (Purpose.RECOVERY, token_count + 1))
    )
    keys_of = recovery_keys if token_count else target_keys
    keys = keys_of(seed, base_length, token_count + 1)
    return Uniforms(np.array(accept, dtype=np.float64), np.array(recover), keys)


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
