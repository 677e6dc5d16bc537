"""`block`: rejection sampling of the whole proposal at once. Lossless, and accepts at least as much as `residual`.

Sun et al., "Block Verification Accelerates Speculative Decoding" (ICLR 2025, arXiv 2403.10444), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, islice

import numpy as np

from tandem.acceptance.rounds import Noise, Round
from tandem.acceptance.rows import JointRow, joint_row, with_next_tokens
from tandem.model.types import Acceptance


def block(rounds: Sequence[Round], noise: Noise) -> list[Acceptance]:
    """Keep the longest prefix that passes its test, even if shorter prefixes fail theirs.

    The weight of a prefix is the share of its draft probability that the target can still use: a token that
    is more likely under the target than under the draft makes up for an earlier one that is less likely.
    Token-by-token rejection loses that gain. The token after the kept prefix is drawn in proportion to
    max(weight * target - draft, 0).

    The noise of the round must be fresh (`tandem.model.sampling.noise` explains why), as its keys are.
    """
    for own in rounds:
        own.check()
    joint = [[joint_row(own, index) for index in range(len(own.proposal.token_ids))] for own in rounds]
    # p_i of the paper for the prefixes of 0 to K tokens: min(1, p_(i-1) * target / draft)
    weights = [
        [*accumulate(rows, lambda before, row: min(1.0, before * row.ratio), initial=1.0)] for rows in joint
    ]
    # Computed for all when the first is needed: many rounds keep their whole proposal, which needs none.
    masses = cache(lambda: _residual_masses(joint, weights))
    counts = [_longest_kept(own, weights[number], masses, number, noise) for number, own in enumerate(rounds)]
    return with_next_tokens(
        rounds, counts, lambda number, count: (joint[number][count], weights[number][count]), noise
    )


def _residual_masses(
    joint: Sequence[Sequence[JointRow]], weights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The sums of max(weight * target - draft, 0) over the vocabulary at each proposed token of each round.

    Each weight is that of the prefix before the token. The sum over a support depends on nothing but that support, so a
    round is decided alike alone and among others.
    """
    rows = [row for own in joint for row in own]
    before = [weight for own in weights for weight in own[:-1]]
    sizes = [each.row.token_ids.size for each in rows]
    residuals = np.concatenate([each.row.probs for each in rows])
    residuals *= np.repeat(before, sizes)
    residuals -= np.fmax(np.concatenate([each.draft_probs for each in rows]), 0.0)
    np.maximum(residuals, 0.0, out=residuals)
    inside: list[float] = np.add.reduceat(residuals, [0, *accumulate(sizes[:-1])]).tolist()
    masses = (
        mass + weight * each.row.outside_mass if each.row.outside_token_id >= 0 else mass
        for mass, weight, each in zip(inside, before, rows, strict=True)
    )
    return [[*islice(masses, len(own))] for own in joint]


def _longest_kept(
    own: Round, weights: Sequence[float], masses: Callable[[], list[list[float]]], number: int, noise: Noise
) -> int:
    """Return the length of the longest prefix that passes its test; the longest is tried first."""
    count = len(own.proposal.token_ids)
    for length in range(count, 0, -1):
        # h_i of the paper: the probability to keep this prefix if no longer one is kept.
        keep = weights[length]
        if length < count and keep > 0.0:
            # Zero over zero means that draft and target are equal after the prefix. The prefix one token longer then
            # has weight 1 as well, so that it or a longer one is always kept.
            mass = masses()[number][length]
            keep = mass / (mass + 1.0 - keep) if mass > 0.0 else 0.0
        if noise.uniform(own, length - 1) < keep:
            return length
    return 0
