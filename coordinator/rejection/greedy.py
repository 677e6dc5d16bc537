"""`greedy`: keep what the target would have said itself. Lossless at temperature 0, where it is the only rule."""

from __future__ import annotations

from coordinator.rejection.rows import check_rows, target_argmax
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification


def accept(
    proposal: Proposal, verification: Verification, sampling: SamplingParams, uniforms: Uniforms
) -> Acceptance:
    """Accepts while the token is the target's most probable one; that one follows the accepted run.

    At a temperature other than 0 the output is that of greedy decoding, which is not what was asked for.

    Raises:
        RowError: The rows do not tell the target's most probable token, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    for index, token_id in enumerate(proposal.token_ids):
        if (expected := target_argmax(verification, index, sampling)) != token_id:
            return Acceptance(index, expected, NextToken.RECOVERED)
    return Acceptance(len(proposal), target_argmax(verification, len(proposal), sampling), NextToken.BONUS)
