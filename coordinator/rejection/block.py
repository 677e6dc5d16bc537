"""`block`: rejection sampling of the whole proposal at once. Lossless, and accepts at least as much as `residual`.

Sun et al., "Block Verification Accelerates Speculative Decoding" (ICLR 2025, arXiv 2403.10444), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rejection.rows import JointRow, check_rows, joint_row, sample_bonus
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, FloatArray, NextToken, Proposal, SamplingParams, Verification


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Keep the longest prefix that passes its test, even if shorter prefixes fail theirs.

    The weight of a prefix is the share of its draft probability that the target can still use: a token that
    is more likely under the target than under the draft makes up for an earlier one that is less likely.
    Token-by-token rejection loses that gain. The token after the kept prefix is drawn in proportion to
    max(weight * target - draft, 0).

    The noise of the round must be fresh (`tandem.sampling.noise` explains why); `draw_uniforms` ensures that.

    Raises:
        RowError: The rows leave out a token that the draft could have proposed, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    count = len(proposal)
    rows = [joint_row(proposal, verification, index, sampling) for index in range(count)]
    weights = _prefix_weights(proposal, rows)
    kept = _longest_kept(weights, rows, uniforms.accept)
    if kept == count:
        bonus = sample_bonus(verification, sampling, uniforms, count)
        return Acceptance(count, bonus, NextToken.BONUS)
    row = rows[kept]
    recovered = row.target.sample_residual(row.draft_probs, uniforms, kept, weights[kept])
    return Acceptance(kept, recovered, NextToken.RECOVERED)


def _prefix_weights(proposal: Proposal, rows: list[JointRow]) -> list[float]:
    """Return p_i of the paper for the prefixes of 0 to K tokens: min(1, p_(i-1) * target / draft)."""
    weights = [1.0]
    for token_id, row in zip(proposal.token_ids, rows, strict=True):
        weights.append(min(1.0, weights[-1] * row.ratio(token_id)))
    return weights


def _longest_kept(weights: list[float], rows: list[JointRow], uniforms: Sequence[float] | FloatArray) -> int:
    """Return the length of the longest prefix that passes its test. Tries the longest first, which skips most tests."""
    for length in range(len(rows), 0, -1):
        following = rows[length] if length < len(rows) else None
        if uniforms[length - 1] < _keep_probability(weights[length], following):
            return length
    return 0


def _keep_probability(weight: float, following: JointRow | None) -> float:
    """Return h_i of the paper: the probability to keep a prefix of this weight if no longer one is kept.

    Zero over zero means that draft and target are equal after the prefix. The prefix one token longer then has
    weight 1 as well, so that it or a longer one is always kept.
    """
    if following is None or weight == 0.0:
        return weight
    residual_mass = following.target.residual_mass(following.draft_probs, weight)
    return residual_mass / (residual_mass + 1.0 - weight) if residual_mass > 0.0 else 0.0
