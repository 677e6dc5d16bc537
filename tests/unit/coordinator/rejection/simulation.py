"""A simulated draft and target that sample and answer like the services, from logits seeded by the prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from coordinator.rejection import AcceptanceRule, Round
from tandem.engine.interface import RowRequest
from tandem.sampling.noise import proposal_keys, sample, target_keys
from tandem.sampling.warping import warp
from tandem.types import (
    Acceptance,
    Delta,
    Float32Array,
    IntArray,
    Proposal,
    RowKind,
    SamplingParams,
    SparseDistribution,
    Verification,
    VerifyStep,
)
from tests.unit.engine.verified import verified

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ToyModel:
    """Logits that depend on the last tokens, and that two models partly share."""

    name: int
    vocabulary_size: int = 12
    own_share: float = 0.5

    def logits(self, tokens: Tokens) -> Float32Array:
        """Shape [vocabulary_size]."""
        return _logits(self, tokens[-3:])


@cache
def _logits(model: ToyModel, tokens: Tokens) -> Float32Array:
    context = [token + 1 for token in tokens]
    common = np.random.default_rng([99, *context]).normal(0, 2, model.vocabulary_size)
    own = np.random.default_rng([model.name, *context]).normal(0, 2, model.vocabulary_size)
    mixed: Float32Array = ((1 - model.own_share) * common + model.own_share * own).astype(np.float32)
    return mixed


def propose(
    model: ToyModel, tokens: Tokens, count: int, kind: RowKind, sampling: SamplingParams, draft_top_k: int = 4
) -> Proposal:
    """Answer as a draft service does."""
    token_ids: list[int] = []
    distributions: list[SparseDistribution] = []
    logits_told: list[float] = []
    own_keys = proposal_keys(sampling.seed, len(tokens), count)
    shared_keys = target_keys(sampling.seed, len(tokens), count)
    for index in range(count):
        logits = model.logits((*tokens, *token_ids))
        probs = warp(logits[None], [sampling])
        if kind is RowKind.TOKEN:
            token = int(sample(probs, shared_keys[index : index + 1])[0])
        else:
            ids = np.argsort(-probs[0])[:draft_top_k]
            ids = ids[probs[0, ids] > 0]
            kept = probs[:, ids] / probs[0, ids].sum()
            token = int(ids[sample(kept, own_keys[index : index + 1], ids)[0]])
            distributions.append(SparseDistribution(ids, kept[0].astype(np.float32).astype(np.float64)))
        token_ids.append(token)
        logits_told.append(float(logits[token]))
    return Proposal(len(tokens), tuple(token_ids), tuple(distributions), np.array(logits_told, np.float32))


def verify(
    model: ToyModel,
    tokens: Tokens,
    proposal: Proposal,
    kind: RowKind,
    sampling: SamplingParams,
    supports: tuple[IntArray, ...] = (),
) -> Verification:
    """Answer as a target service does, by its own code."""
    count = len(proposal)
    logits = np.stack([model.logits(tokens + proposal.token_ids[:index]) for index in range(count + 1)])
    if kind is not RowKind.SUPPORT:
        supports = ()
    step = VerifyStep(
        Delta(len(tokens), proposal.token_ids), kind, count + 1, supports, kind is RowKind.SUPPORT
    )
    [verification] = verified([RowRequest(step, sampling)], torch.from_numpy(logits))
    return verification


def one_round(
    rule: AcceptanceRule,
    target: ToyModel,
    draft: ToyModel,
    tokens: Tokens,
    count: int,
    sampling: SamplingParams,
    row_kind: RowKind | None = None,
) -> tuple[Proposal, Acceptance]:
    """Propose, verify, accept."""
    proposal = propose(draft, tokens, count, rule.strategy.draft_row_kind, sampling)
    kind = rule.row_kind(row_kind)
    supports = rule.supports(proposal) if kind is RowKind.SUPPORT else ()
    verification = verify(target, tokens, proposal, kind, sampling, supports)
    thinking = [position % 5 < 2 for position in range(len(tokens), len(tokens) + len(proposal))]
    return proposal, rule.accept(Round(proposal, verification, sampling, thinking))


def generate(
    rule: AcceptanceRule,
    target: ToyModel,
    draft: ToyModel,
    count: int,
    sampling: SamplingParams,
    length: int,
    row_kind: RowKind | None = None,
) -> Tokens:
    """Return the first `length` tokens of a completion of the empty prompt."""
    tokens: Tokens = ()
    while len(tokens) < length:
        proposal, acceptance = one_round(rule, target, draft, tokens, count, sampling, row_kind)
        tokens += proposal.token_ids[: acceptance.accepted_count]
        tokens += (acceptance.next_token_id,) if acceptance.next_token_id >= 0 else ()
    return tokens[:length]
