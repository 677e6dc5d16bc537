"""`logit-comparison` (MAX's `rejection_sampling_strategy`): keep tokens whose logit is no
lower under the target than under the draft. Not lossless.
"""

from __future__ import annotations

import numpy as np

from coordinator.rejection.errors import RowError
from coordinator.rejection.rows import check_rows, sample_target, target_argmax, target_distribution
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification

TOLERANCE = 1e-5
"""Largest difference by which the draft's logit may exceed the target's."""


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Accept tokens while the draft's logit is at most the target's, both before temperature.

    The target's argmax replaces a rejected token. A proposal that is accepted whole gets no bonus token, as in
    MAX. For an empty proposal the rule samples from the target, so that every round yields a token.

    Raises:
        RowError: The draft sent no logits, the rows lack statistics, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    count = len(proposal)
    if not count:
        return Acceptance(
            0, sample_target(verification, 0, sampling, float(uniforms.recover[0])), NextToken.BONUS
        )
    if proposal.token_logits is None:
        raise RowError("logit-comparison needs the logits of the proposed tokens, and the draft sent none")
    for index, token_id in enumerate(proposal.token_ids):
        target = target_distribution(verification, index, np.array([token_id]), sampling)
        target_logit = target.statistics().logits[target.index(token_id)]
        if not float(proposal.token_logits[index]) <= float(target_logit) + TOLERANCE:
            return Acceptance(index, target_argmax(verification, index, sampling), NextToken.RECOVERED)
    return Acceptance(count, -1, NextToken.NONE)
