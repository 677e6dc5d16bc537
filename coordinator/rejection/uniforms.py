"""The random numbers of one round, drawn before the rule that uses them runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.noise import Purpose, uniform
from tandem.types import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent and uniform on the open interval (0, 1)."""

    accept: FloatArray
    """Decides over each proposed token, shape [K]."""
    recover: FloatArray
    """Chooses the token after the accepted run, shape [K + 1]: entry i when i tokens were accepted."""

    def part(self, start: int, stop: int) -> Uniforms:
        """Those for the tokens from `start` to before `stop`, and for the one after them."""
        return Uniforms(self.accept[start:stop], self.recover[start : stop + 1])


NO_UNIFORMS = Uniforms(np.empty(0), np.empty(0))
"""For rules that draw nothing: drawing costs more than such a rule itself."""


def draw_uniforms(seed: int, base_length: int, token_count: int) -> Uniforms:
    """The random numbers of the round that proposes `token_count` tokens after `base_length` ones.

    They are keyed by the base length besides the position, which makes them good for every rule (see
    `tandem.noise`), and they are the same whenever and wherever the round is repeated.
    """
    accept, recover = (
        [uniform(seed, base_length + i, purpose, base_length) for i in range(count)]
        for purpose, count in ((Purpose.ACCEPTANCE, token_count), (Purpose.RECOVERY, token_count + 1))
    )
    return Uniforms(np.array(accept, dtype=np.float64), np.array(recover))
