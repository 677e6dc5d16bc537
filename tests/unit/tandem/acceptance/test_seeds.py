"""With every rule, each kind of row gives the same tokens, and the noise is that of the seed and the position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from tandem.acceptance.rounds import KEYED, Race, Round
from tandem.acceptance.strategies import STRATEGIES, AcceptanceRule, resolve
from tandem.config import SpeculativeConfig
from tandem.engine.interface import RowRequest
from tandem.model.sampling.noise import (
    Purpose,
    recovery_keys,
    sample,
    stream_key,
    stream_keys,
    target_keys,
    token_uniforms,
    uniform,
)
from tandem.model.sampling.warping import warp
from tandem.model.types import (
    Acceptance,
    Delta,
    Float32Array,
    IntArray,
    Proposal,
    RowKind,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TargetOptions,
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
    positions = np.arange(len(tokens), len(tokens) + count)
    own_keys = stream_keys(np.array([sampling.seed]), positions, Purpose.PROPOSAL, len(tokens))
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
    [verification] = verified([RowRequest(step, TargetOptions("r", sampling))], torch.from_numpy(logits))
    return verification


def decided(
    rule: AcceptanceRule,
    tokens: Tokens,
    proposal: Proposal,
    sampling: SamplingParams,
    row_kind: RowKind | None = None,
) -> Acceptance:
    """Verify and accept."""
    kind = rule.row_kind(row_kind)
    supports = rule.supports(proposal) if kind is RowKind.SUPPORT else ()
    verification = verify(TARGET, tokens, proposal, kind, sampling, supports)
    thinking = [position % 5 < 2 for position in range(len(tokens), len(tokens) + len(proposal))]
    return rule.accept(Round(proposal, verification, sampling, thinking))


TARGET = ToyModel(1)
DRAFT = ToyModel(2)
SAMPLING = [
    SamplingParams(temperature=1.0, seed=17),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=-(2**63)),
    SamplingParams(temperature=0.0, seed=3),
]


RELAXED = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 3, "relaxed_delta": 0.3}
NAMED = [
    SpeculativeConfig.model_validate({"rejection_sampling_strategy": name} | more)
    for name, more in (
        *((each.name, {}) for each in STRATEGIES if each.name != "synthetic"),
        ("synthetic", {"synthetic_acceptance_rate": 0.6, "num_speculative_tokens": 4}),
        *((name, RELAXED) for name in ("residual", "typical-acceptance", "logit-comparison")),
    )
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    "options", NAMED, ids=lambda options: f"{options.rejection_sampling_strategy}-{options.relaxed_topk}"
)
def test_dense_rows_give_the_same_tokens_as_those_that_the_rule_asks_for(
    options: SpeculativeConfig, sampling: SamplingParams
) -> None:
    """Under `strict` the coordinator draws from dense rows what the target would have drawn."""
    rule = resolve(options, sampling)
    accepted = []
    for base in range(14):
        tokens = tuple(np.random.default_rng(base).integers(0, 12, base % 7).tolist())
        proposal = propose(DRAFT, tokens, 4, rule.strategy.draft_row_kind, sampling)
        dense = decided(rule, tokens, proposal, sampling, RowKind.DENSE)
        assert dense == decided(rule, tokens, proposal, sampling)
        accepted.append(dense.accepted_count)
    # Every number of accepted tokens occurred.
    assert min(accepted) < max(accepted)


def test_the_token_after_the_run_is_the_argmax_over_the_whole_vocabulary() -> None:
    """Target and coordinator race with the same keys: whoever knows the seed can compute it, as a draft does that
    anticipates the round."""
    rule = resolve(SpeculativeConfig(rejection_sampling_strategy="residual"), SAMPLING[0])
    prompt = (0, 0)
    from_outside = 0
    for seed in range(60):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        proposal = propose(DRAFT, prompt, 2, rule.strategy.draft_row_kind, sampling)
        acceptance = decided(rule, prompt, proposal, sampling)
        count = acceptance.accepted_count
        weights = warp(TARGET.logits(prompt + proposal.token_ids[:count])[None], [sampling])[0]
        if count < len(proposal):
            drawn = proposal.distributions[count]
            assert isinstance(drawn, SparseDistribution)
            weights[drawn.token_ids] = np.maximum(weights[drawn.token_ids] - drawn.probs, 0.0)
            from_outside += acceptance.next_token_id not in drawn.token_ids
        key = np.array([stream_key(seed, len(prompt) + count, Purpose.RECOVERY, len(prompt))])
        exponential = -np.log(token_uniforms(key, TARGET.vocabulary_size)[0])
        assert acceptance.next_token_id == (weights / exponential).argmax()
    assert from_outside > 5


def test_the_coordinator_draws_with_the_keys_of_the_round() -> None:
    """Noise of the proposal, of acceptance and of recovery is never reused."""
    row = SupportRow(np.arange(50), np.ones(50), 0.0, -1)
    own = Round(Proposal(20, (1,) * 8), Verification(20, ()), SamplingParams(seed=3))
    assert KEYED.uniform(own, 2) == uniform(3, 22, Purpose.ACCEPTANCE, 20)
    winner = token_uniforms(recovery_keys(3, 20, 9)[4:5], 50)[0].argmax()
    assert KEYED.sample([Race(own, 4, row, row.probs)]) == [winner]
    empty = Round(Proposal(20), Verification(20, ()), own.sampling)
    winner = token_uniforms(target_keys(3, 20, 1), 50)[0].argmax()
    assert KEYED.sample([Race(empty, 0, row, row.probs)]) == [winner]
