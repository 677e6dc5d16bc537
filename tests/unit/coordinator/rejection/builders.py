"""Short builders of rows and proposals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.rejection.uniforms import Uniforms
from tandem.sampling.noise import recovery_keys
from tandem.types import (
    DenseRow,
    Float32Array,
    IntArray,
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
    """A deterministic proposal."""
    told = None if logits is None else np.array(logits, dtype=np.float32)
    return Proposal(base_length, token_ids, token_logits=told)


def sparse(probs: dict[int, float]) -> SparseDistribution:
    return SparseDistribution(np.array(list(probs), dtype=np.int64), np.array(list(probs.values())))


def sampled(*tokens: tuple[int, dict[int, float]], base_length: int = 0) -> Proposal:
    """Tokens, each with the distribution it was drawn from."""
    return Proposal(
        base_length, tuple(token for token, _ in tokens), tuple(sparse(probs) for _, probs in tokens)
    )


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
    return SupportRow(told.token_ids, told.probs, mass, outside, statistics)


def bonus_row(token_id: int) -> SupportRow:
    """The row after the proposal: no support, a sample."""
    return SupportRow(NO_IDS, np.array([]), 1.0, token_id)


def statistics(
    argmax: int,
    entropy: float = 0.0,
    max_prob: float = 1.0,
    ranks: Sequence[int] = (),
    logits: Sequence[float] = (),
) -> RowStatistics:
    return RowStatistics(entropy, max_prob, argmax, np.array(ranks, np.int64), np.array(logits, np.float32))


def dense_row(probs: Sequence[float]) -> DenseRow:
    return DenseRow(log_probs(probs))


def log_probs(probs: Sequence[float]) -> Float32Array:
    with np.errstate(divide="ignore"):
        logits: Float32Array = np.log(np.array(probs)).astype(np.float32)
    return logits


def uniforms(*accept: float, recover: float = 0.5) -> Uniforms:
    """`recover` chooses from rows without an outside probability; others are sampled with the seed of `SAMPLED`."""
    count = len(accept) + 1
    keys = recovery_keys(SAMPLED.seed, 0, count)
    return Uniforms(np.array(accept, dtype=float), np.full(count, recover), keys)
