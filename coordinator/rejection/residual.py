"""`residual`: rejection sampling, token by token. Lossless. vLLM calls it `probabilistic`, later `standard`.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023),
Algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023),
Algorithm 2.
"""

from __future__ import annotations

from coordinator.rejection.rows import check_rows, joint_row, sample_bonus
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Accept each token with probability min(1, target / draft), up to the first rejection.

    The token that replaces the rejected one is drawn in proportion to max(target - draft, 0); after a proposal
    that is accepted whole a sample of the target follows. A proposal without distributions is deterministic:
    each token has draft probability 1, and its replacement is never the token itself.

    Raises:
        RowError: The rows leave out a token that the draft could have proposed, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    decisions = zip(proposal.token_ids, uniforms.accept, strict=True)
    for index, (token_id, uniform) in enumerate(decisions):
        row = joint_row(proposal, verification, index, sampling)
        # Strictly below: a token of probability zero must not pass when both sides are 0.
        if not uniform < row.ratio(token_id):
            recovered = row.target.sample_residual(row.draft_probs, uniforms, index)
            return Acceptance(index, recovered, NextToken.RECOVERED)
    count = len(proposal)
    bonus = sample_bonus(verification, sampling, uniforms, count)
    return Acceptance(count, bonus, NextToken.BONUS)
