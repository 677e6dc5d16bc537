"""Every lossless rule emits the target's distribution, to 1e-12, by summing over all branches."""

from __future__ import annotations

from fractions import Fraction

import pytest

from coordinator.rejection import Noise, Round
from tandem.types import Acceptance, Proposal, SamplingParams, Verification
from tests.unit.coordinator.rejection.builders import block, residual
from tests.unit.coordinator.rejection.enumeration import (
    Distribution,
    Model,
    Setting,
    Tokens,
    mean_accepted,
    output_distribution,
    target_distribution,
    total_variation,
)

RULES = {"residual": residual, "block": block}
TOLERANCE = 1e-12


def _table(*rows: str) -> Model:
    """A model that chooses a row by the sum of the previous tokens, so that every prefix matters."""
    probs = [[float(Fraction(entry)) for entry in row.split()] for row in rows]
    assert all(abs(sum(row) - 1) < 1e-15 for row in probs)
    return lambda tokens: probs[
        sum((place + 1) * (token + 1) for place, token in enumerate(tokens)) % len(probs)
    ]


TARGET = _table("1/2 1/3 1/6", "1/10 1/5 7/10", "3/7 3/7 1/7")
DRAFT = _table("1/5 3/5 1/5", "2/3 1/6 1/6", "1/4 1/4 1/2", "5/8 1/8 1/4")
PAIRS: dict[str, tuple[Model, Model]] = {
    "both positive": (TARGET, DRAFT),
    "draft lacks tokens": (TARGET, _table("0 3/5 2/5", "1 0 0", "1/4 0 3/4")),
    "target lacks tokens": (_table("0 1/3 2/3", "1/2 1/2 0", "0 1 0"), DRAFT),
    "each lacks what the other has": (_table("0 1/3 2/3", "1/2 1/2 0"), _table("1/4 3/4 0", "0 1/5 4/5")),
    "disjoint": (_table("0 1/3 2/3"), _table("1 0 0")),
    "equal": (TARGET, TARGET),
    "nearly certain": (_table("999/1000 1/1000 0", "1/1000 0 999/1000"), _table("1/1000 999/1000 0")),
    "two tokens": (_table("1/3 2/3", "9/10 1/10"), _table("2/3 1/3", "1/2 1/2")),
    "four tokens": (_table("1/8 1/8 1/2 1/4", "0 1/5 2/5 2/5"), _table("2/5 1/10 1/4 1/4", "0 0 1/2 1/2")),
}


def _assert_equal(actual: Distribution, expected: Distribution) -> None:
    for tokens in actual.keys() | expected.keys():
        assert actual.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=TOLERANCE), tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("token_count", [1, 2])
def test_the_output_has_the_targets_distribution(rule: str, pair: str, token_count: int) -> None:
    target, draft = PAIRS[pair]
    setting = Setting(target, draft, token_count)
    actual = output_distribution(RULES[rule], setting, length=3)
    _assert_equal(actual, target_distribution(target, 3))


@pytest.mark.parametrize("rule", RULES)
def test_proposals_of_three_tokens_are_exact(rule: str) -> None:
    target, draft = PAIRS["two tokens"]
    actual = output_distribution(RULES[rule], Setting(target, draft, token_count=3), length=3)
    _assert_equal(actual, target_distribution(target, 3))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("extra_ids", [1, 2, 3])
def test_every_size_of_support_is_exact(rule: str, extra_ids: int) -> None:
    # The draft lacks one, two or three of four tokens, so the support grows up to the whole vocabulary.
    target = _table("1/8 1/8 1/2 1/4", "0 1/5 2/5 2/5", "1/2 0 0 1/2")
    draft = _table("0 1/10 1/2 2/5", "0 0 1/2 1/2", "0 0 1 0")
    setting = Setting(target, draft, 2, extra_ids=extra_ids)
    actual = output_distribution(RULES[rule], setting, length=2)
    _assert_equal(actual, target_distribution(target, 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("extra_ids", [0, 1, 2])
def test_a_deterministic_draft_is_exact(rule: str, extra_ids: int) -> None:
    draft = _table("1 0 0", "0 0 1", "0 1 0")
    setting = Setting(TARGET, draft, 2, extra_ids=extra_ids, one_hot=True)
    _assert_equal(output_distribution(RULES[rule], setting, length=3), target_distribution(TARGET, 3))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", ["both positive", "draft lacks tokens", "each lacks what the other has"])
def test_dense_rows_are_exact(rule: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    actual = output_distribution(RULES[rule], Setting(target, draft, 2, dense=True), length=2)
    _assert_equal(actual, target_distribution(target, 2))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("token_count", [1, 2])
def test_residual_accepts_the_overlap_of_draft_and_target(pair: str, token_count: int) -> None:
    """Leviathan et al., Theorem 3.5: a token is accepted with probability sum(min(target, draft))."""
    target, draft = PAIRS[pair]

    def expected(tokens: Tokens, left: int) -> float:
        shared = [min(probs) for probs in zip(target(tokens), draft(tokens), strict=True)]
        deeper = [expected((*tokens, token), left - 1) if left > 1 else 0.0 for token in range(len(shared))]
        return sum(mass * (1 + more) for mass, more in zip(shared, deeper, strict=True))

    accepted = mean_accepted(residual, Setting(target, draft, token_count))
    assert accepted == pytest.approx(expected((), token_count), abs=TOLERANCE)


@pytest.mark.parametrize("pair", PAIRS)
def test_block_accepts_at_least_as_much(pair: str) -> None:
    setting = Setting(*PAIRS[pair], token_count=2)
    token_by_token, at_once = (mean_accepted(accept, setting) for accept in (residual, block))
    assert at_once >= token_by_token - TOLERANCE
    if pair == "both positive":
        assert at_once > token_by_token + 0.01


def test_block_equals_residual_for_one_token() -> None:
    setting = Setting(TARGET, DRAFT, token_count=1)
    assert mean_accepted(block, setting) == pytest.approx(mean_accepted(residual, setting), abs=1e-12)


def test_the_sum_over_branches_detects_a_small_mistake() -> None:
    """A rule that accepts one token in 10**9 too many must fail."""

    def accept(
        proposal: Proposal, verification: Verification, sampling: SamplingParams, noise: Noise
    ) -> Acceptance:
        class Generous(Noise):
            def uniform(self, own: Round, index: int) -> float:
                return noise.uniform(own, index) * (1 - 1e-9)

            sample = noise.sample

        return residual(proposal, verification, sampling, Generous())

    target, draft = PAIRS["both positive"]
    actual = output_distribution(accept, Setting(target, draft, 1), length=1)
    assert total_variation(actual, target_distribution(target, 1)) > 10 * TOLERANCE
