"""`greedy`: keep the tokens of greedy decoding. Lossless at temperature 0, where it is the only rule."""

from __future__ import annotations

from coordinator.rejection.rows import check_rows, target_argmax
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Accept tokens while each is the target's argmax; the argmax follows the accepted run.

    At any other temperature the output is still that of greedy decoding, so `resolve` uses the rule only at 0.

    Raises:
        RowError: The rows do not contain the target's argmax, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    for index, token_id in enumerate(proposal.token_ids):
        if (expected := target_argmax(verification, index, sampling)) != token_id:
            return Acceptance(index, expected, NextToken.RECOVERED)
    return Acceptance(len(proposal), target_argmax(verification, len(proposal), sampling), NextToken.BONUS)
