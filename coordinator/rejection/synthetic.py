"""`synthetic`: accept at a given rate, whatever the models say. For benchmarks of everything else; not lossless.

Three ways to say the rate: MAX's `synthetic_acceptance_rate`, vLLM's `synthetic_acceptance_rates` and vLLM's
`synthetic_acceptance_length`. Each becomes a schedule: for each position of the proposal, the probability that
its token is accepted once all before it are.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rejection.rows import check_rows, target_argmax
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification

_BISECTIONS = 60
"""Halvings of the interval [0, 1]: more than float64 can tell apart near 1."""


def accept(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    uniforms: Uniforms,
    schedule: Sequence[float],
) -> Acceptance:
    """Accepts each token with the schedule's probability; the target's most probable token follows.

    Args:
        proposal: What the draft said; only its length matters.
        verification: Rows that tell the target's most probable token.
        sampling: Whether token rows do.
        uniforms: Decide over each token.
        schedule: Conditional probabilities, one for each position. Tokens past its end are rejected.

    Raises:
        RowError: The rows do not tell the target's most probable token, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    count = len(proposal)
    decisions = zip(uniforms.accept.tolist(), schedule, strict=False)
    accepted = next((index for index, (u, rate) in enumerate(decisions) if not u < rate), None)
    if accepted is None:
        accepted = min(count, len(schedule))
    next_token = NextToken.BONUS if accepted == count else NextToken.RECOVERED
    return Acceptance(accepted, target_argmax(verification, accepted, sampling), next_token)


def schedule_of_rate(rate: float, token_count: int) -> tuple[float, ...]:
    """One probability b for all positions, such that a token is accepted with probability `rate` on average.

    The token at position i (from 1) is accepted with probability b**i, since all before it must be; b solves
    mean(b**i) = rate. MAX's `synthetic_acceptance_rate`.
    """
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mean = sum(middle**position for position in range(1, token_count + 1)) / token_count
        low, high = (middle, high) if mean < rate else (low, middle)
    return (high,) * token_count


def schedule_of_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """From the probability that each position is accepted, non-increasing, to that given those before it.

    vLLM's `synthetic_acceptance_rates`.
    """
    reached = (1.0, *rates)
    return tuple(rate / before if before > 0.0 else 0.0 for before, rate in zip(reached, rates, strict=False))


def schedule_of_length(length: float, token_count: int) -> tuple[float, ...]:
    """The schedule of least variance with `length` tokens for each round, the one after the run included.

    Whole positions are always accepted, the next one with the fraction that is left, the others never.
    vLLM's `synthetic_acceptance_length`.
    """
    accepted = length - 1.0
    return tuple(min(max(accepted - position, 0.0), 1.0) for position in range(token_count))
