"""Tables of each rule: the accepted tokens, the next token, and the rows that it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rejection import RowError, rules
from tandem.types import (
    Acceptance,
    Proposal,
    SamplingParams,
    SparseDistribution,
    TargetRow,
    TokenRow,
    Verification,
)
from tests.unit.coordinator.rejection.builders import (
    BONUS,
    GREEDY,
    RECOVERED,
    SAMPLED,
    Accept,
    block,
    bonus_row,
    dense_row,
    greedy,
    logit_comparison,
    proposal,
    relaxed,
    residual,
    sampled,
    statistics,
    strict,
    support_row,
    synthetic,
    token_rows,
    typical,
    uniforms,
    verification,
)

OWN_TOKENS = [
    pytest.param([], [9], Acceptance(0, 9, BONUS), id="nothing proposed"),
    pytest.param([1], [1, 9], Acceptance(1, 9, BONUS), id="one, match"),
    pytest.param([1], [2, 9], Acceptance(0, 2, RECOVERED), id="one, mismatch"),
    pytest.param([1, 2, 3], [1, 2, 3, 9], Acceptance(3, 9, BONUS), id="all match"),
    pytest.param([1, 2, 3], [5, 2, 3, 9], Acceptance(0, 5, RECOVERED), id="mismatch at the first"),
    pytest.param([1, 2, 3], [1, 5, 3, 9], Acceptance(1, 5, RECOVERED), id="mismatch at the second"),
    pytest.param([1, 2, 3], [1, 2, 5, 9], Acceptance(2, 5, RECOVERED), id="mismatch at the last"),
    pytest.param([1, 2, 3], [5, 6, 7, 9], Acceptance(0, 5, RECOVERED), id="none match"),
    pytest.param([1, 1, 1], [1, 1, 0, 1], Acceptance(2, 0, RECOVERED), id="repeated token, and id 0"),
]


@pytest.mark.parametrize(("proposed", "target", "expected"), OWN_TOKENS)
@pytest.mark.parametrize(("accept", "sampling"), [(greedy, GREEDY), (strict, SAMPLED)])
def test_token_rows(
    accept: Accept, sampling: SamplingParams, proposed: list[int], target: list[int], expected: Acceptance
) -> None:
    drawn = uniforms(*[0.5] * len(proposed))
    assert accept(proposal(*proposed), token_rows(*target), sampling, drawn) == expected


@pytest.mark.parametrize(("proposed", "target", "expected"), OWN_TOKENS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("kind", ["support", "dense"])
def test_greedy_reads_the_argmax_of_every_kind_of_row(
    kind: str, sampling: SamplingParams, proposed: list[int], target: list[int], expected: Acceptance
) -> None:
    rows: list[TargetRow] = [
        support_row({}, outside=0, statistics=statistics(argmax=token))
        if kind == "support"
        else dense_row(np.eye(10)[token] * 0.1 + 0.09)
        for token in target
    ]
    drawn = uniforms(*[0.5] * len(proposed))
    assert greedy(proposal(*proposed), verification(*rows), sampling, drawn) == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    tied = dense_row([0.1, 0.3, 0.3, 0.3])
    rows = verification(tied, tied)
    assert greedy(proposal(2), rows, GREEDY, uniforms(0.5)) == Acceptance(0, 1, RECOVERED)


def test_the_most_probable_token_is_one_that_top_p_keeps() -> None:
    tied = dense_row([0.4, 0.4, 0.2])
    narrow = SamplingParams(temperature=1.0, top_p=0.1)
    assert greedy(proposal(), verification(tied), narrow, uniforms()).next_token_id == 1
    inside = relaxed(rules.residual, [True])(proposal(2), verification(tied, tied), narrow, uniforms(0.5))
    assert inside == Acceptance(0, 1, RECOVERED)


def test_greedy_refuses_samples() -> None:
    with pytest.raises(RowError, match="samples"):
        greedy(proposal(1), token_rows(1, 2), SAMPLED, uniforms(0.5))


def test_strict_refuses_rows_without_the_targets_sample() -> None:
    rows = verification(support_row({1: 0.5}, outside=2), bonus_row(0))
    with pytest.raises(RowError, match="support rows"):
        strict(proposal(1), rows, SAMPLED, uniforms(0.5))


HALF = {1: 0.5, 2: 0.5}
ONE_TOKEN = [
    pytest.param({1: 0.25, 2: 0.75}, 0.49, Acceptance(1, 7, BONUS), id="below the ratio"),
    pytest.param({1: 0.25, 2: 0.75}, 0.5, Acceptance(0, 2, RECOVERED), id="at the ratio"),
    pytest.param({1: 0.25, 2: 0.75}, 0.51, Acceptance(0, 2, RECOVERED), id="above the ratio"),
    pytest.param({1: 0.75, 2: 0.25}, 0.999999, Acceptance(1, 7, BONUS), id="the target likes it better"),
    pytest.param({1: 0.0, 2: 1.0}, 0.001, Acceptance(0, 2, RECOVERED), id="impossible for the target"),
]


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize(("target", "uniform", "expected"), ONE_TOKEN)
def test_one_proposed_token(
    accept: Accept, target: dict[int, float], uniform: float, expected: Acceptance
) -> None:
    rows = verification(support_row(target), bonus_row(7))
    assert accept(sampled((1, HALF)), rows, SAMPLED, uniforms(uniform)) == expected


def test_residual_recovers_in_proportion_to_the_residual() -> None:
    given = sampled((1, {1: 0.6, 2: 0.2, 3: 0.2}))
    # The residual is 0, 0.05, 0.1 and 0.35 outside: of 0.5 in all.
    rows = verification(support_row({1: 0.1, 2: 0.25, 3: 0.3}, outside=8), bonus_row(7))
    noise = uniforms(0.9)
    acceptance = residual(given, rows, SAMPLED, noise)
    assert (acceptance.accepted_count, acceptance.next_token) == (0, RECOVERED)
    assert noise.laws == [pytest.approx({2: 0.1, 3: 0.2, 8: 0.7})]


def test_residual_of_a_deterministic_token_never_recovers_it() -> None:
    rows = verification(support_row({1: 0.9}, outside=8), bonus_row(7))
    noise = uniforms(0.95)
    assert residual(proposal(1), rows, SAMPLED, noise) == Acceptance(0, 8, RECOVERED)
    assert noise.laws == [{8: 1.0}]
    assert residual(proposal(1), rows, SAMPLED, uniforms(0.85)) == Acceptance(1, 7, BONUS)


@pytest.mark.parametrize(
    ("accepted_at", "count"),
    [([0.9, 0.1, 0.1], 0), ([0.1, 0.9, 0.1], 1), ([0.1, 0.1, 0.9], 2), ([0.1, 0.1, 0.1], 3), ([0.9] * 3, 0)],
)
def test_residual_stops_at_the_first_rejection(accepted_at: list[float], count: int) -> None:
    given = sampled(*[(1, {1: 0.8, 2: 0.2})] * 3)
    rows = verification(*[support_row({1: 0.4, 2: 0.6})] * 3, bonus_row(7))
    expected = Acceptance(count, 7, BONUS) if count == 3 else Acceptance(count, 2, RECOVERED)
    assert residual(given, rows, SAMPLED, uniforms(*accepted_at)) == expected


def test_block_accepts_a_token_that_a_later_one_makes_up_for() -> None:
    """The first token alone has weight 1/2; the second, twice as likely under the target, restores 1."""
    given = sampled((1, {1: 0.8, 2: 0.2}), (1, {1: 0.4, 2: 0.6}))
    rows = verification(support_row({1: 0.4, 2: 0.6}), support_row({1: 0.8, 2: 0.2}), bonus_row(7))
    late = uniforms(0.99, 0.99)
    assert residual(given, rows, SAMPLED, late) == Acceptance(0, 2, RECOVERED)
    assert block(given, rows, SAMPLED, late) == Acceptance(2, 7, BONUS)


def test_block_recovers_from_the_weighted_residual() -> None:
    """By hand, after Algorithm 2: p_1 = 1/2; S_1 = sum(p_1 P - Q)+ = 0.45 - 0.3; h_1 = 0.15 / (0.15 + 0.5)."""
    given = sampled((1, {1: 0.8, 2: 0.2}), (2, {1: 0.3, 2: 0.7}))
    rows = verification(support_row({1: 0.4, 2: 0.6}), support_row({1: 0.9, 2: 0.1}), bonus_row(7))
    threshold = 0.15 / 0.65
    assert block(given, rows, SAMPLED, uniforms(threshold - 1e-9, 0.5)) == Acceptance(1, 1, RECOVERED)
    assert block(given, rows, SAMPLED, uniforms(threshold + 1e-9, 0.5)) == Acceptance(0, 2, RECOVERED)
    # h_2 = p_2 = p_1 * 0.1 / 0.7
    assert block(given, rows, SAMPLED, uniforms(0.99, 0.5 / 7 - 1e-9)) == Acceptance(2, 7, BONUS)
    assert block(given, rows, SAMPLED, uniforms(0.99, 0.5 / 7 + 1e-9)) == Acceptance(0, 2, RECOVERED)


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize("broken", [float("nan"), 0.0, -1.0])
@pytest.mark.parametrize("uniform", [1e-12, 0.5, 1 - 1e-12])
def test_a_token_without_a_draft_probability_is_rejected(
    accept: Accept, broken: float, uniform: float
) -> None:
    given = sampled((1, {1: broken, 2: 0.5}), (2, HALF))
    rows = verification(support_row({1: 0.3, 2: 0.7}), support_row(HALF), bonus_row(7))
    acceptance = accept(given, rows, SAMPLED, uniforms(uniform, uniform))
    assert acceptance.accepted_count == 0
    assert acceptance.next_token_id in (1, 2)


@pytest.mark.parametrize("accept", [residual, block])
def test_nan_draft_probabilities_recover_from_the_target(accept: Accept) -> None:
    given = sampled((1, {1: float("nan"), 2: float("nan")}))
    rows = verification(support_row({1: 0.3, 2: 0.7}), bonus_row(7))
    noise = uniforms(0.5)
    assert accept(given, rows, SAMPLED, noise).accepted_count == 0
    assert noise.laws == [pytest.approx({1: 0.3, 2: 0.7})]


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize("broken", [float("nan"), -1.0])
def test_an_invalid_draft_never_yields_a_token_without_target_probability(
    accept: Accept, broken: float
) -> None:
    given = sampled((1, {1: broken, 2: 0.5, 3: 0.5}))
    rows = verification(support_row({1: 0.0, 2: 0.3, 3: 0.7}), bonus_row(7))
    noise = uniforms(0.5)
    assert accept(given, rows, SAMPLED, noise) == Acceptance(0, 3, RECOVERED)
    assert noise.laws == [{3: 1.0}]


@pytest.mark.parametrize("accept", [residual, block])
def test_a_token_that_its_own_distribution_lacks_is_rejected(accept: Accept) -> None:
    given = Proposal(0, (3,), (SparseDistribution(np.array([1, 2]), np.array([0.5, 0.5])),))
    rows = verification(support_row({1: 0.3, 2: 0.3, 3: 0.4}), bonus_row(7))
    acceptance = accept(given, rows, SAMPLED, uniforms(1e-9))
    assert acceptance.accepted_count == 0
    assert acceptance.next_token_id == 3  # the whole residual


@pytest.mark.parametrize("accept", [residual, block])
def test_a_row_without_the_proposed_token_is_refused(accept: Accept) -> None:
    rows = verification(support_row({2: 0.4}, outside=5), bonus_row(7))
    with pytest.raises(RowError, match="token 1"):
        accept(proposal(1), rows, SAMPLED, uniforms(0.5))


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize("broken", [{1: float("nan"), 2: 0.5}, {1: 0.0, 2: 0.0}])
def test_a_target_row_without_mass_is_refused(accept: Accept, broken: dict[int, float]) -> None:
    rows = verification(support_row(broken), bonus_row(7))
    with pytest.raises(RowError, match="not a probability distribution"):
        accept(sampled((1, HALF)), rows, SAMPLED, uniforms(0.5))


@pytest.mark.parametrize("accept", [residual, block, typical()])
def test_token_rows_are_not_enough_for_rules_of_probabilities(accept: Accept) -> None:
    with pytest.raises(RowError, match="probabilities"):
        accept(proposal(1), token_rows(1, 2), SAMPLED, uniforms(0.5))


ALL_RULES: list[Accept] = [
    greedy,
    strict,
    residual,
    block,
    typical(),
    logit_comparison,
    synthetic(0.5),
]


@pytest.mark.parametrize("accept", ALL_RULES)
@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        (proposal(1), token_rows(1, 2, base_length=4), "sequence of 4 tokens"),
        (proposal(1), token_rows(1), "1 proposed tokens need one row more, not 1"),
        (proposal(1), token_rows(1, 2, 3), "not 3"),
        (Proposal(0, (1, 2), sampled((1, HALF)).distributions), token_rows(1, 2, 3), "1 distributions"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    accept: Accept, given: Proposal, rows: Verification, message: str
) -> None:
    with pytest.raises(RowError, match=message):
        accept(given, rows, GREEDY, uniforms(*[0.5] * len(given)))


READS_SUPPORT = [rule for rule in ALL_RULES if rule is not strict]
WITH_STATISTICS = support_row({}, outside=6, statistics=statistics(argmax=6))


@pytest.mark.parametrize(
    ("accept", "row"),
    [(accept, row) for accept in ALL_RULES for row in (TokenRow(6), dense_row([0] * 6 + [1.0]))]
    + [(accept, WITH_STATISTICS) for accept in READS_SUPPORT],
)
def test_an_empty_proposal_is_answered(accept: Accept, row: TargetRow) -> None:
    assert accept(proposal(), verification(row), GREEDY, uniforms()) == Acceptance(0, 6, BONUS)


def test_each_position_has_its_own_uniforms() -> None:
    given = sampled(*[(1, {1: 0.8, 2: 0.2})] * 3)
    rows = verification(*[support_row({1: 0.4, 2: 0.6})] * 3, bonus_row(7))
    assert residual(given, rows, SAMPLED, uniforms(0.1, 0.1, 0.9)) == Acceptance(2, 2, RECOVERED)
