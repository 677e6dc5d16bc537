"""`synthetic`: accept at a given rate, whatever the models predict. For benchmarks of the system around them; not
lossless.

The rate has three spellings: MAX's `synthetic_acceptance_rate`, vLLM's `synthetic_acceptance_rates` and vLLM's
`synthetic_acceptance_length`. Each becomes a schedule: for each position of the proposal, the probability that
its token is accepted given that all earlier ones are.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rejection.rows import check_rows, target_argmax
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification

_BISECTIONS = 60
"""Halvings of the interval [0, 1]; float64 resolves fewer near 1."""


def accept(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    uniforms: Uniforms,
    schedule: Sequence[float],
) -> Acceptance:
    """Accept each token with the schedule's probability; the target's argmax follows.

    Args:
        proposal: K tokens; only their number matters.
        verification: Rows that contain the target's argmax.
        sampling: The request's sampling parameters; a token row holds the argmax at temperature 0 alone.
        uniforms: Decide on each token.
        schedule: Conditional probabilities, one for each position. Tokens past its end are rejected.

    Raises:
        RowError: The rows do not contain the target's argmax, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    count = len(proposal)
    decisions = zip(uniforms.accept, schedule, strict=False)
    accepted = next((index for index, (u, rate) in enumerate(decisions) if not u < rate), None)
    if accepted is None:
        accepted = min(count, len(schedule))
    next_token = NextToken.BONUS if accepted == count else NextToken.RECOVERED
    return Acceptance(accepted, target_argmax(verification, accepted, sampling), next_token)


def schedule_of_rate(rate: float, token_count: int) -> tuple[float, ...]:
    """Return one probability b for all positions, such that tokens are accepted with probability `rate` on average.

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
    """Turn the probabilities of acceptance, non-increasing, into ones given that all earlier tokens are accepted.

    vLLM's `synthetic_acceptance_rates`.
    """
    reached = (1.0, *rates)
    return tuple(rate / before if before > 0.0 else 0.0 for before, rate in zip(reached, rates, strict=False))


def schedule_of_length(length: float, token_count: int) -> tuple[float, ...]:
    """Return the schedule of minimum variance with `length` tokens per round, the one after the run included.

    The first positions are always accepted, the next one with the remaining fraction, and the others never.
    vLLM's `synthetic_acceptance_length`.
    """
    accepted = length - 1.0
    return tuple(min(max(accepted - position, 0.0), 1.0) for position in range(token_count))
