"""Rules that stay exact when the next round reuses the noise of the last one at the same positions.

`tandem.sampling.noise` keys proposals and acceptance uniforms by the round. This shows by enumeration that block
verification needs it, and that token-by-token rejection would not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from coordinator.rejection.rounds import Race
from tandem.types import Proposal, SparseDistribution, SupportRow, Verification
from tests.unit.coordinator.rejection.builders import Accept, GivenNoise, block, law, residual
from tests.unit.coordinator.rejection.enumeration import (
    SAMPLING,
    Tokens,
    measure,
    target_distribution,
    total_variation,
)

TARGET_PROBS = np.array([0.7, 0.3])
DRAFT_PROBS = np.array([0.4, 0.6])
IDS = np.array([0, 1])
NO_IDS = np.array([], dtype=np.int64)


def _two_tokens(accept: Accept, proposed: Tokens, uniforms: Sequence[float]) -> tuple[int, int]:
    """Return the first two tokens if the noise at a position is the same in every round.

    Args:
        accept: The rule.
        proposed: Tokens that the draft proposes at positions 0, 1 and 2 in every round.
        uniforms: Acceptance uniforms of positions 0, 1 and 2, then recovery uniforms of positions 0 and 1.
    """
    first = _round(accept, 0, proposed[:2], Inverting(uniforms[:2], [*uniforms[3:], 0.5]))
    if len(first) > 1:
        return first[0], first[1]
    second = _round(accept, 1, proposed[1:], Inverting(uniforms[1:3], [uniforms[4], 0.5, 0.5]))
    return first[0], second[0]


class Inverting(GivenNoise):
    """Chooses the token after i accepted ones by inversion, with the uniform at i."""

    def __init__(self, accept: Sequence[float], recover: Sequence[float]) -> None:
        super().__init__(accept)
        self._recover = recover

    def sample(self, races: Sequence[Race]) -> list[int]:
        return [self._inverted(race) for race in races]

    def _inverted(self, race: Race) -> int:
        left = self._recover[race.accepted_count]
        probs = law(race)
        for token, prob in probs.items():
            left -= prob
            if left < 0.0:
                return token
        return token


def _round(accept: Accept, base_length: int, proposed: Tokens, uniforms: Inverting) -> Tokens:
    count = len(proposed)
    proposal = Proposal(base_length, proposed, (SparseDistribution(IDS, DRAFT_PROBS),) * count)
    row, last = SupportRow(IDS, TARGET_PROBS, 0.0, -1), SupportRow(NO_IDS, NO_IDS.astype(float), 1.0, 0)
    acceptance = accept(proposal, Verification(base_length, (row,) * count + (last,)), SAMPLING, uniforms)
    return (*proposed[: acceptance.accepted_count], acceptance.next_token_id)


def _bias(accept: Accept) -> float:
    """Return the total variation distance of the first two tokens from the target's."""
    actual: defaultdict[Tokens, float] = defaultdict(float)
    for proposed in itertools.product((0, 1), repeat=3):
        mass = float(np.prod(DRAFT_PROBS[list(proposed)]))
        outcomes = measure(lambda point, proposed=proposed: _two_tokens(accept, proposed, point), 5)  # type: ignore[misc]
        for tokens, share in outcomes.items():
            actual[tokens] += mass * share
    return total_variation(actual, target_distribution(lambda tokens: TARGET_PROBS.tolist(), 2))


def test_block_verification_needs_fresh_noise() -> None:
    assert _bias(block) == pytest.approx(0.045, abs=1e-9)


def test_token_by_token_rejection_stays_exact_with_reused_noise() -> None:
    assert _bias(residual) == pytest.approx(0.0, abs=1e-12)
