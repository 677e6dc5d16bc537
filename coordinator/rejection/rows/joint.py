"""Target and draft at one position, on one support."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.rejection.errors import RowError
from coordinator.rejection.rows.target import (
    NO_DISTRIBUTION,
    TargetDistribution,
    find_id,
    target_distribution,
)
from tandem.sampling.warping import warp
from tandem.types import FloatArray, IntArray, Proposal, SamplingParams, SparseDistribution, Verification


def draft_support(proposal: Proposal, index: int) -> IntArray | None:
    """Return the ids with a draft probability at `index`, shape [S]; None for the whole vocabulary."""
    if not proposal.distributions:
        return np.array([proposal.token_ids[index]], dtype=np.int64)
    distribution = proposal.distributions[index]
    return distribution.token_ids if isinstance(distribution, SparseDistribution) else None


@dataclass(frozen=True, slots=True, eq=False)
class JointRow:
    """Target and draft at one position, on one support that covers the draft's."""

    target: TargetDistribution
    draft_probs: FloatArray
    """The draft's probabilities on the target's support, shape [S]."""

    def ratio(self, token_id: int) -> float:
        """Return the target's probability of a token divided by the draft's.

        The ratio is 0 when the draft's probability is zero or NaN: an honest draft cannot have drawn such a token,
        and rejecting it is safe, because a sample of the residual always has target probability.

        Raises:
            RowError: The target's row leaves the token out, or holds NaN for it.
        """
        index = self.target.index(token_id)
        target_prob, draft_prob = float(self.target.probs[index]), float(self.draft_probs[index])
        if not target_prob >= 0.0:
            raise RowError(NO_DISTRIBUTION)
        return target_prob / draft_prob if draft_prob > 0.0 else 0.0


def joint_row(
    proposal: Proposal, verification: Verification, index: int, sampling: SamplingParams
) -> JointRow:
    """Join target and draft at `index`.

    Raises:
        RowError: The target's support leaves out a token that the draft could have proposed. Rejection
            sampling would not be exact.
    """
    token_ids, draft_probs = _draft_distribution(proposal, index, sampling)
    target = target_distribution(verification, index, token_ids, sampling)
    if target.token_ids is not token_ids and not np.array_equal(target.token_ids, token_ids):
        draft_probs = _align(token_ids, draft_probs, target.token_ids)
    return JointRow(target, draft_probs)


def _draft_distribution(
    proposal: Proposal, index: int, sampling: SamplingParams
) -> tuple[IntArray, FloatArray]:
    if not proposal.distributions:
        return np.array([proposal.token_ids[index]], dtype=np.int64), np.ones(1)
    distribution = proposal.distributions[index]
    if isinstance(distribution, SparseDistribution):
        return distribution.token_ids, distribution.probs
    probs: FloatArray = warp(distribution.logits[None, :], [sampling])[0]
    return np.arange(probs.size), probs


def _align(token_ids: IntArray, probs: FloatArray, support: IntArray) -> FloatArray:
    """Reorder the probabilities to another support, with zeros for ids that the draft lacks."""
    aligned = np.zeros(support.size)
    for token_id, prob in zip(token_ids, probs, strict=True):
        index = find_id(support, int(token_id))
        if index >= 0:
            aligned[index] = prob
        elif prob > 0.0:
            raise RowError(f"the target's row leaves out token {token_id}, which the draft may propose")
    return aligned


def check_rows(proposal: Proposal, verification: Verification) -> None:
    """Raise RowError unless the verification answers the proposal and both are complete."""
    if verification.base_length != proposal.base_length:
        raise RowError(
            f"the verification extends a sequence of {verification.base_length} tokens, "
            f"the proposal one of {proposal.base_length}"
        )
    if len(verification.rows) != len(proposal) + 1:
        raise RowError(f"{len(proposal)} proposed tokens need one row more, not {len(verification.rows)}")
    if proposal.distributions and len(proposal.distributions) != len(proposal):
        raise RowError(
            f"{len(proposal)} proposed tokens came with {len(proposal.distributions)} distributions"
        )
