"""A seed determines everything with `strict`; with every rule, both kinds of row give the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rejection import STRATEGIES, resolve
from tandem.config import SpeculativeConfig
from tandem.sampling.noise import sample, target_keys
from tandem.sampling.warping import warp
from tandem.types import RowKind, SamplingParams
from tests.unit.coordinator.rejection.simulation import Tokens, ToyModel, generate, one_round

TARGET, DRAFT, OTHER_DRAFT = ToyModel(1), ToyModel(2), ToyModel(3, own_share=0.9)
LENGTH = 40
SAMPLING = [
    SamplingParams(temperature=1.0, seed=17),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=-(2**63)),
    SamplingParams(temperature=0.0, seed=3),
]


def _target_alone(sampling: SamplingParams) -> Tokens:
    tokens: Tokens = ()
    for position in range(LENGTH):
        probs = warp(TARGET.logits(tokens)[None], [sampling])
        tokens += (int(sample(probs, target_keys(sampling.seed, position, 1))[0]),)
    return tokens


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("row_kind", [RowKind.TOKEN, RowKind.DENSE])
def test_strict_gives_the_output_of_the_target_alone(
    sampling: SamplingParams, count: int, row_kind: RowKind
) -> None:
    rule = resolve(SpeculativeConfig(rejection_sampling_strategy="strict"), sampling)
    expected = _target_alone(sampling)
    for draft in (DRAFT, OTHER_DRAFT, TARGET):
        assert generate(rule, TARGET, draft, count, sampling, LENGTH, row_kind) == expected


def test_strict_accepts_everything_from_the_target_itself() -> None:
    rule = resolve(SpeculativeConfig(rejection_sampling_strategy="strict"), SAMPLING[0])
    _, acceptance = one_round(rule, TARGET, TARGET, (), 8, SAMPLING[0])
    assert acceptance.accepted_count == 8


def test_strict_depends_on_the_seed() -> None:
    rule = resolve(SpeculativeConfig(rejection_sampling_strategy="strict"), SAMPLING[0])
    outputs = {
        generate(rule, TARGET, DRAFT, 2, SamplingParams(temperature=1.0, seed=seed), LENGTH)
        for seed in range(8)
    }
    assert len(outputs) == 8


NAMED = [
    *(
        SpeculativeConfig(rejection_sampling_strategy=strategy.name)
        for strategy in STRATEGIES
        if strategy.name not in ("synthetic", "strict")
    ),
    SpeculativeConfig(
        rejection_sampling_strategy="synthetic", synthetic_acceptance_rate=0.6, num_speculative_tokens=4
    ),
    *(
        SpeculativeConfig(
            rejection_sampling_strategy=name,
            use_relaxed_acceptance_for_thinking=True,
            relaxed_topk=3,
            relaxed_delta=0.3,
        )
        for name in ("residual", "typical-acceptance", "logit-comparison")
    ),
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    "options", NAMED, ids=lambda options: f"{options.rejection_sampling_strategy}-{options.relaxed_topk}"
)
def test_dense_and_support_rows_give_the_same_tokens(
    options: SpeculativeConfig, sampling: SamplingParams
) -> None:
    rule = resolve(options, sampling)
    accepted = []
    for base in range(30):
        tokens = tuple(np.random.default_rng(base).integers(0, 12, base % 7).tolist())
        _, dense = one_round(rule, TARGET, DRAFT, tokens, 4, sampling, RowKind.DENSE)
        _, support = one_round(rule, TARGET, DRAFT, tokens, 4, sampling, RowKind.SUPPORT)
        assert dense == support
        accepted.append(dense.accepted_count)
    # Every number of accepted tokens occurred.
    assert min(accepted) < max(accepted)
