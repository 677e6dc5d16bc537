"""Short builders of rows and proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tandem.acceptance import rules
from tandem.acceptance.block import block as block_rule
from tandem.acceptance.rounds import Decide, Noise, Race, Round
from tandem.model.types import (
    Acceptance,
    DenseRow,
    Float32Array,
    IntArray,
    NextToken,
    Proposal,
    RowStatistics,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=5)
NO_IDS: IntArray = np.array([], dtype=np.int64)


def proposal(*token_ids: int, base_length: int = 0, logits: Sequence[float] | None = None) -> Proposal:
    told = None if logits is None else np.array(logits, dtype=np.float32)
    return Proposal(base_length, token_ids, token_logits=told)


def sparse(probs: dict[int, float]) -> SparseDistribution:
    return SparseDistribution(np.array(list(probs), dtype=np.int64), np.array(list(probs.values())))


def sampled(*tokens: tuple[int, dict[int, float]]) -> Proposal:
    """Tokens, each with the distribution it was drawn from."""
    return Proposal(0, tuple(token for token, _ in tokens), tuple(sparse(probs) for _, probs in tokens))


def verification(*rows: TargetRow, base_length: int = 0) -> Verification:
    return Verification(base_length, rows)


def token_rows(*token_ids: int, base_length: int = 0) -> Verification:
    return Verification(base_length, tuple(TokenRow(token_id) for token_id in token_ids))


def support_row(
    probs: dict[int, float], outside: int = -1, statistics: RowStatistics | None = None
) -> SupportRow:
    """The rest of the probability lies outside."""
    told = sparse(probs)
    mass = 1.0 - sum(probs.values()) if outside >= 0 else 0.0
    return SupportRow(told.token_ids, told.probs, mass, outside, statistics, mass)


def bonus_row(token_id: int) -> SupportRow:
    """The row after the proposal: no support, a sample."""
    return SupportRow(NO_IDS, np.array([]), 1.0, token_id, outside_prob=1.0)


def statistics(
    argmax: int,
    entropy: float = 0.0,
    max_prob: float = 1.0,
    ranks: Sequence[int] = (0,),
    logits: Sequence[float] = (0.0,),
) -> RowStatistics:
    return RowStatistics(entropy, max_prob, argmax, np.array(ranks, np.int64), np.array(logits, np.float32))


def dense_row(probs: Sequence[float]) -> DenseRow:
    return DenseRow(log_probs(probs))


def log_probs(probs: Sequence[float]) -> Float32Array:
    with np.errstate(divide="ignore"):
        logits: Float32Array = np.log(np.array(probs)).astype(np.float32)
    return logits


class GivenNoise(Noise):
    """Uniforms that a test gives. Samples are drawn as always, and what they are drawn from is recorded."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self.given = uniforms
        self.laws: list[dict[int, float]] = []
        """For each sample, the probability of each token."""

    def uniform(self, own: Round, index: int) -> float:
        return float(self.given[index])

    def sample(self, races: Sequence[Race]) -> list[int]:
        self.laws.extend(map(law, races))
        return super().sample(races)


def law(race: Race) -> dict[int, float]:
    """The probability that each token wins: its share of the weights. Empty without a positive weight."""
    weights = dict(zip(race.row.token_ids.tolist(), race.weights.tolist(), strict=True))
    if race.row.outside_token_id >= 0:
        weights[race.row.outside_token_id] = race.outside_weight
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight > 0.0} if total > 0.0 else {}


def uniforms(*accept: float) -> GivenNoise:
    return GivenNoise(accept)


Accept = Callable[[Proposal, Verification, SamplingParams, Noise], Acceptance]
"""Decides one round."""


def accepting(decide: Decide) -> Accept:
    return lambda proposal, rows, sampling, noise: decide([Round(proposal, rows, sampling)], noise)[0]


greedy = accepting(rules.greedy)
strict = accepting(rules.strict)
residual = accepting(rules.residual)
block = accepting(block_rule)
logit_comparison = accepting(rules.logit_comparison)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Accept:
    return accepting(rules.typical(epsilon, delta))


def synthetic(*schedule: float) -> Accept:
    return accepting(rules.synthetic(schedule))


def relax(rule: rules.TokenRule, thinking: Sequence[bool], top_k: int = 10, delta: float = 0.6) -> Accept:
    decide = rules.relax(rule, top_k, delta)
    return accepting(
        lambda rounds, noise: decide([replace(each, thinking=thinking) for each in rounds], noise)
    )


BONUS = NextToken.BONUS
RECOVERED = NextToken.RECOVERED
NONE = NextToken.NONE
