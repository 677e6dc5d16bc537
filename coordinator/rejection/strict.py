"""`strict` (vLLM's `rejection_sample_method`): keep the tokens that equal the target's own samples. Lossless.

Draft and target sample with the same noise (`tandem.sampling.noise`), which is what makes them agree. The output is a
function of the seed and the target alone: neither the draft nor the number of proposed tokens changes it.
"""

from __future__ import annotations

from coordinator.rejection.errors import RowError
from coordinator.rejection.rows import check_rows, sample_target
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, SupportRow, Verification

# A uniform chooses within a support. The rows here have none: they are sampled with the target's own noise.
_UNUSED = 0.5


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Accept tokens while each is the target's own sample; that sample follows the accepted run.

    The rule takes token rows, or dense rows, from which it draws the sample that the target would have
    drawn. It does not use the uniforms.

    Raises:
        RowError: The rows are support rows, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    if any(isinstance(row, SupportRow) for row in verification.rows):
        raise RowError("strict needs the target's own samples, which support rows do not contain")
    for index, token_id in enumerate(proposal.token_ids):
        sample = sample_target(verification, index, sampling, _UNUSED)
        if sample != token_id:
            return Acceptance(index, sample, NextToken.RECOVERED)
    count = len(proposal)
    bonus = sample_target(verification, count, sampling, _UNUSED)
    return Acceptance(count, bonus, NextToken.BONUS)
