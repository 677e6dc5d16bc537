"""With a grammar every lossless rule emits the masked target's distribution, to 1e-12, whatever the draft proposes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tandem.engine.rows import masked
from tandem.grammar import GrammarState
from tandem.types import Grammar, GrammarKind
from tests.unit.coordinator.rejection.builders import block, residual
from tests.unit.coordinator.rejection.enumeration import (
    Distribution,
    Model,
    Setting,
    Tokens,
    output_distribution,
    target_distribution,
    total_variation,
)
from tests.unit.tandem.tiny_grammars import VOCABULARY_SIZE, allowed_by, tiny_grammars

RULES = {"residual": residual, "block": block}
PERIOD = (("a", "b"), ("b", "c"), ("a", "c"))
GRAMMAR = Grammar(GrammarKind.REGEX, "((a|b)(b|c)(a|c)){2}")
WORDS = ["".join(letters) for letters in itertools.product(*PERIOD * 2)]
LOGITS = torch.randn(5, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(3))
DRAFT_LOGITS = LOGITS + torch.randn(5, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(4))
TOLERANCE = 1e-12
ALL = np.full((1, 2), -1, dtype=np.int32)


def row(table: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return table[sum((place + 1) * (token + 1) for place, token in enumerate(tokens)) % len(table)]


def by_enumeration(table: torch.Tensor) -> Model:
    """The model among the ids that begin a word."""

    def probabilities(tokens: Tokens) -> list[float]:
        allowed = allowed_by(WORDS, tokens)
        weights = [
            float(logit.double().exp()) if token in allowed else 0.0
            for token, logit in enumerate(row(table, tokens))
        ]
        return [weight / sum(weights) for weight in weights]

    return probabilities


def by_mask(table: torch.Tensor, state: GrammarState) -> Model:
    """The model as the services compute it: each row masked by the state after the proposal's tokens before it."""

    def probabilities(tokens: Tokens) -> list[float]:
        start = len(tokens) // 2  # wherever the proposal begins
        masks = state.masks(tokens[:start], tokens[start:]) if state.follow(list(tokens[:start])) else ALL
        found: list[float] = masked(row(table, tokens)[None], masks[-1:])[0].double().softmax(-1).tolist()
        return found

    return probabilities


def unmasked(table: torch.Tensor) -> Model:
    def probabilities(tokens: Tokens) -> list[float]:
        found: list[float] = row(table, tokens).double().softmax(-1).tolist()
        return found

    return probabilities


def distance(actual: Distribution, expected: Distribution) -> float:
    return max(abs(actual.get(t, 0.0) - expected.get(t, 0.0)) for t in actual.keys() | expected.keys())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("token_count", [1, 2])
def test_the_output_has_the_masked_targets_distribution(rule: str, heeds: bool, token_count: int) -> None:
    state = tiny_grammars().compiled(GRAMMAR)
    draft = by_mask(DRAFT_LOGITS, state) if heeds else unmasked(DRAFT_LOGITS)
    setting = Setting(by_mask(LOGITS, state), draft, token_count)
    length = 2
    actual = output_distribution(RULES[rule], setting, length)
    expected = target_distribution(by_enumeration(LOGITS), length)
    assert distance(actual, expected) < TOLERANCE
    assert total_variation(expected, target_distribution(unmasked(LOGITS), length)) > 0.1, "it constrains"


@pytest.mark.parametrize("rule", RULES)
def test_what_is_proposed_without_a_model_is_exact(rule: str) -> None:
    """A deterministic proposal that the grammar may forbid, as of ngram, or demand, as of a jump ahead."""
    state = tiny_grammars().compiled(GRAMMAR)

    def looked_up(tokens: Tokens) -> list[float]:
        return np.eye(VOCABULARY_SIZE)[sum(tokens) % 7].tolist()  # type: ignore[no-any-return]

    setting = Setting(by_mask(LOGITS, state), looked_up, 2, one_hot=True)
    actual = output_distribution(RULES[rule], setting, 2)
    assert distance(actual, target_distribution(by_enumeration(LOGITS), 2)) < TOLERANCE
