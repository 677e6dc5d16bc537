"""The acceptance rules but for `block`: each decides rounds of any number of sequences.

Those that go token by token are a `TokenRule`: which tokens pass, and what follows the first that does not. Relaxed
acceptance wraps one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.acceptance.rounds import Noise, Round
from tandem.acceptance.rows import (
    joint_row,
    sample_target,
    target_argmax,
    target_sample,
    token_statistics,
    with_next_tokens,
)
from tandem.errors import ProtocolError
from tandem.model.types import Acceptance, NextToken


def greedy(rounds: Sequence[Round], noise: Noise) -> list[Acceptance]:
    """`greedy`: accept tokens while each is the target's argmax; the argmax follows. Lossless at temperature 0.

    At any other temperature the output is still that of greedy decoding, so `resolve` uses the rule only at 0.
    """
    return [_accept_equal(own, target_argmax) for own in rounds]


def strict(rounds: Sequence[Round], noise: Noise) -> list[Acceptance]:
    """`strict` (vLLM): accept tokens while each is the target's own sample; that sample follows. Lossless.

    Draft and target sample with the same noise (`tandem.model.sampling.noise`), which is what makes them agree. The
    output is a function of the seed and the target alone: neither the draft nor the number of proposed tokens changes
    it.
    """
    return [_accept_equal(own, target_sample) for own in rounds]


def _accept_equal(own: Round, target_token: Callable[[Round, int], int]) -> Acceptance:
    own.check()
    for index, token_id in enumerate(own.proposal.token_ids):
        if (expected := target_token(own, index)) != token_id:
            return Acceptance(index, expected, NextToken.RECOVERED)
    count = len(own.proposal.token_ids)
    return Acceptance(count, target_token(own, count), NextToken.BONUS)


Follow = Callable[[Sequence[Round], Sequence[int], Noise], list[Acceptance]]
"""Gives each round the token after so many accepted ones."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """A rule that decides token by token, up to the first that does not pass."""

    passes: Callable[[Round, int, Noise], bool]
    """Decides on the proposed token at an index, given that all before it passed."""
    follow: Follow

    def __call__(self, rounds: Sequence[Round], noise: Noise) -> list[Acceptance]:
        passes = self.passes
        counts = []
        for own in rounds:
            own.check()
            count = len(own.proposal.token_ids)
            rejected = (index for index in range(count) if not passes(own, index, noise))
            counts.append(next(rejected, count))
        return self.follow(rounds, counts, noise)


residual = TokenRule(
    # Strictly below: a token of probability zero must not pass when both sides are 0.
    lambda own, index, noise: noise.uniform(own, index) < joint_row(own, index).ratio,
    lambda rounds, counts, noise: with_next_tokens(
        rounds, counts, lambda number, count: (joint_row(rounds[number], count), 1.0), noise
    ),
)
"""`residual`: accept each token with probability min(1, target / draft). Lossless. vLLM: `probabilistic`, `standard`.

The token that replaces the rejected one is drawn in proportion to max(target - draft, 0); after a proposal that is
accepted whole a sample of the target follows. A proposal without distributions is deterministic: each token has draft
probability 1, and its replacement is never the token itself.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), Algorithm 1;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023), Algorithm 2.
"""


def typical(epsilon: float, delta: float) -> TokenRule:
    """`typical-acceptance`: accept tokens whose target probability exceeds min(epsilon, delta * exp(-entropy)).

    A sample of the target follows the accepted run. The rule ignores the draft's distribution, so it is not lossless:
    tokens that pass occur as often as the draft proposes them. Cai et al., "Medusa: Simple LLM Inference Acceleration
    Framework with Multiple Decoding Heads" (ICML 2024), section 2.3.1; the name is MAX's.
    """

    def passes(own: Round, index: int, noise: Noise) -> bool:
        target = token_statistics(own, index)
        return target.prob > min(epsilon, delta * math.exp(-target.entropy))

    return TokenRule(passes, _each(_sample))


def _each(follow: Callable[[Round, int, Noise], Acceptance]) -> Follow:
    """Give the rounds their next tokens one by one."""
    return lambda rounds, counts, noise: [
        follow(own, count, noise) for own, count in zip(rounds, counts, strict=True)
    ]


def _sample(own: Round, count: int, noise: Noise) -> Acceptance:
    return Acceptance(count, sample_target(own, count, noise), _kind(own, count))


def _most_probable(own: Round, count: int, noise: Noise) -> Acceptance:
    return Acceptance(count, target_argmax(own, count), _kind(own, count))


def _kind(own: Round, count: int) -> NextToken:
    return NextToken.BONUS if count == len(own.proposal.token_ids) else NextToken.RECOVERED


def _logit_passes(own: Round, index: int, noise: Noise) -> bool:
    logits = own.proposal.token_logits
    if logits is None:
        raise ProtocolError(
            "logit-comparison needs the logits of the proposed tokens, and the draft sent none"
        )
    # MAX's tolerance
    return float(logits[index]) <= token_statistics(own, index).logit + 1e-5


def _logit_follow(own: Round, count: int, noise: Noise) -> Acceptance:
    if not own.proposal.token_ids:
        return _sample(own, 0, noise)
    if count == len(own.proposal.token_ids):
        return Acceptance(count, -1, NextToken.NONE)
    return _most_probable(own, count, noise)


logit_comparison = TokenRule(_logit_passes, _each(_logit_follow))
"""`logit-comparison` (MAX): accept tokens while the draft's logit is at most the target's, both before temperature.

Not lossless. The target's argmax replaces a rejected token. A proposal that is accepted whole gets no bonus token, as
in MAX. For an empty proposal the rule samples from the target, so that every round yields a token.
"""


def relax(rule: TokenRule, top_k: int, delta: float) -> TokenRule:
    """Relaxed acceptance for thinking (MAX's `use_relaxed_acceptance_for_thinking`). Not lossless.

    Inside a think span a token passes when it is one of the target's `top_k` most probable ones and its probability is
    at least the maximum minus `delta`; the target's argmax replaces one that does not. Outside, the rule decides.
    """

    def is_inside(own: Round, index: int) -> bool:
        return index < len(own.thinking) and own.thinking[index]

    def passes(own: Round, index: int, noise: Noise) -> bool:
        if not is_inside(own, index):
            return rule.passes(own, index, noise)
        target = token_statistics(own, index)
        # A token that a grammar or a truncation forbids has no probability, and may be within `delta` all the same
        return target.rank < top_k and target.prob > 0.0 and target.prob >= target.max_prob - delta

    def follow(own: Round, count: int, noise: Noise) -> Acceptance:
        if is_inside(own, count):
            return _most_probable(own, count, noise)
        return rule.follow([own], [count], noise)[0]

    return TokenRule(passes, _each(follow))


def synthetic(schedule: Sequence[float]) -> TokenRule:
    """`synthetic`: accept at a given rate, whatever the models predict; the target's argmax follows.

    For benchmarks of the system around them; not lossless. The schedule has for each position the probability that its
    token is accepted given that all earlier ones are; tokens past its end are rejected.
    """

    def passes(own: Round, index: int, noise: Noise) -> bool:
        return index < len(schedule) and noise.uniform(own, index) < schedule[index]

    return TokenRule(passes, _each(_most_probable))


def schedule_of_rate(rate: float, token_count: int) -> tuple[float, ...]:
    """Return one probability b for all positions, such that tokens are accepted with probability `rate` on average.

    The token at position i (from 1) is accepted with probability b**i, since all before it must be; b solves
    mean(b**i) = rate. MAX's `synthetic_acceptance_rate`.
    """
    low = 0.0
    high = 1.0
    # Enough for every float64 in [0, 1]
    for _ in range(60):
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
