"""`typical-acceptance`: keep tokens that are typical enough under the target. Not lossless.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (ICML 2024),
section 2.3.1; the name is MAX's (`rejection_sampling_strategy`).
"""

from __future__ import annotations

import math

import numpy as np

from coordinator.rejection.rows import check_rows, sample_target, target_distribution
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification

DEFAULT_EPSILON = 0.09
DEFAULT_DELTA = 0.3


def accept(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    uniforms: Uniforms,
    epsilon: float = DEFAULT_EPSILON,
    delta: float = DEFAULT_DELTA,
) -> Acceptance:
    """Accept tokens while their target probability exceeds min(epsilon, delta * exp(-entropy)).

    A sample of the target follows the accepted run. The rule ignores the draft's distribution, so the output
    does not have the target's distribution: tokens that pass occur as often as the draft proposes them.

    Raises:
        RowError: The rows leave out a proposed token, lack statistics, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    for index, token_id in enumerate(proposal.token_ids):
        target = target_distribution(verification, index, np.array([token_id]), sampling)
        threshold = min(epsilon, delta * math.exp(-target.statistics().entropy))
        if not target.prob(token_id) > threshold:
            recovered = target.sample(float(uniforms.recover[index]))
            return Acceptance(index, recovered, NextToken.RECOVERED)
    count = len(proposal)
    bonus = sample_target(verification, count, sampling, float(uniforms.recover[count]))
    return Acceptance(count, bonus, NextToken.BONUS)
