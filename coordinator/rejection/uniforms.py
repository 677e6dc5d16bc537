"""The random numbers of one round, drawn before the rule that uses them runs, and the two ways to choose with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tandem.sampling.noise import Purpose, race, recovery_keys, target_keys, uniform
from tandem.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent and uniform on the open interval (0, 1)."""

    accept: FloatArray
    """Decides over each proposed token, shape [K]."""
    recover: FloatArray
    """Chooses the token after the accepted run, shape [K + 1]: entry i when i tokens were accepted."""
    recovery_keys: IntArray
    """Keys of the noise that chooses the same token by a race, int64 [K + 1]. A round uses one of the two."""

    def part(self, start: int, stop: int) -> Uniforms:
        """Those for the tokens from `start` to before `stop`, and for the one after them."""
        following = slice(start, stop + 1)
        return Uniforms(self.accept[start:stop], self.recover[following], self.recovery_keys[following])

    def race(self, index: int, token_ids: IntArray, weights: FloatArray) -> int:
        """The token after `index` accepted ones: each wins in proportion to its weight.

        The winner has the highest weight / exponential, the exponentials being independent (see
        `tandem.sampling.noise.race`). The winner of any part of the tokens can stand for that part: whoever wins
        among such winners wins among all.

        Args:
            index: How many tokens were accepted.
            token_ids: Those that take part, int64 [N].
            weights: Not negative, float64 [N].

        Returns:
            The winner's id; -1 when the weights do not add up to a positive number.
        """
        if not token_ids.size:
            return -1
        key = self.recovery_keys[index : index + 1]
        # One token alone, as the target's sample after the proposal is, wins whatever the noise.
        column = int(race(weights[None, :], key, token_ids)[0]) if token_ids.size > 1 else 0
        # Of weights that are all zero, or among which one is no number, the winner is such a one.
        return int(token_ids[column]) if 0.0 < weights[column] < math.inf else -1


NO_UNIFORMS = Uniforms(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
"""For rules that draw nothing: drawing costs more than such a rule itself."""


def draw_uniforms(seed: int, base_length: int, token_count: int) -> Uniforms:
    """The random numbers of the round that proposes `token_count` tokens after `base_length` ones.

    They are keyed by the base length besides the position, which makes them good for every rule (see
    `tandem.sampling.noise`), and they are the same whenever and wherever the round is repeated. Where nothing is
    proposed, the race is the target's own: its sample then comes out, whichever kind of row tells of it.
    """
    accept, recover = (
        [uniform(seed, base_length + i, purpose, base_length) for i in range(count)]
        for purpose, count in ((Purpose.ACCEPTANCE, token_count), (Purpose.RECOVERY, token_count + 1))
    )
    keys_of = recovery_keys if token_count else target_keys
    keys = keys_of(seed, base_length, token_count + 1)
    return Uniforms(np.array(accept, dtype=np.float64), np.array(recover), keys)


def invert(weights: FloatArray, outside_mass: float, uniform: float) -> int:
    """Chooses in proportion to the weights by inverting their cumulative sum, the outside last.

    Args:
        weights: Not negative, float64 [N].
        outside_mass: Weight of everything else.
        uniform: Chooses.

    Returns:
        The index of a weight, N for the outside; -1 when the weights do not add up to a positive number.
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
    # The product was rounded up to the total: the last positive weight is meant, not what follows it.
    return int(cumulative.searchsorted(inside_mass, "left"))
