"""From options to a rule, and tables of each rule: accepted tokens, next token, and the rows that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tandem.acceptance import rules
from tandem.acceptance.rounds import Round
from tandem.acceptance.rules import schedule_of_length, schedule_of_rate, schedule_of_rates
from tandem.acceptance.strategies import STRATEGIES, find_strategy, resolve
from tandem.config import SpeculativeConfig
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    Acceptance,
    NextToken,
    Proposal,
    RowKind,
    SamplingParams,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)
from tests.unit.tandem.acceptance.builders import (
    BONUS,
    GREEDY,
    NONE,
    RECOVERED,
    SAMPLED,
    Accept,
    block,
    bonus_row,
    dense_row,
    greedy,
    logit_comparison,
    proposal,
    relax,
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


ROWS_OF: dict[str, Callable[[int], TargetRow]] = {
    "token": TokenRow,
    "support": lambda token: support_row({}, outside=0, statistics=statistics(argmax=token)),
    "dense": lambda token: dense_row(np.eye(10)[token] * 0.1 + 0.09),
}


@pytest.mark.parametrize(("proposed", "target", "expected"), OWN_TOKENS)
@pytest.mark.parametrize(
    ("accept", "sampling", "kind"),
    [(strict, SAMPLED, "token"), (greedy, SAMPLED, "dense"), *((greedy, GREEDY, kind) for kind in ROWS_OF)],
)
def test_greedy_and_strict_take_the_targets_own_tokens(
    accept: Accept,
    sampling: SamplingParams,
    kind: str,
    proposed: list[int],
    target: list[int],
    expected: Acceptance,
) -> None:
    rows = verification(*map(ROWS_OF[kind], target))
    assert accept(proposal(*proposed), rows, sampling, uniforms(*[0.5] * len(proposed))) == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    tied = dense_row([0.1, 0.3, 0.3, 0.3])
    rows = verification(tied, tied)
    assert greedy(proposal(2), rows, GREEDY, uniforms(0.5)) == Acceptance(0, 1, RECOVERED)


def test_the_most_probable_token_is_one_that_top_p_keeps() -> None:
    tied = dense_row([0.4, 0.4, 0.2])
    narrow = SamplingParams(temperature=1.0, top_p=0.1)
    assert greedy(proposal(), verification(tied), narrow, uniforms()).next_token_id == 1
    inside = relax(rules.residual, [True])(proposal(2), verification(tied, tied), narrow, uniforms(0.5))
    assert inside == Acceptance(0, 1, RECOVERED)


HALF = {1: 0.5, 2: 0.5}
ONE_TOKEN = [
    pytest.param({1: 0.25, 2: 0.75}, 0.49, Acceptance(1, 7, BONUS), id="below the ratio"),
    pytest.param({1: 0.25, 2: 0.75}, 0.5, Acceptance(0, 2, RECOVERED), id="at the ratio"),
    pytest.param({1: 0.25, 2: 0.75}, 0.51, Acceptance(0, 2, RECOVERED), id="above the ratio"),
    pytest.param({1: 0.75, 2: 0.25}, 0.999999, Acceptance(1, 7, BONUS), id="the target likes it better"),
    # `u <= target / draft` would accept it
    pytest.param({1: 0.0, 2: 1.0}, 0.0, Acceptance(0, 2, RECOVERED), id="impossible for the target"),
]


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize(("target", "uniform", "expected"), ONE_TOKEN)
def test_one_proposed_token(
    accept: Accept, target: dict[int, float], uniform: float, expected: Acceptance
) -> None:
    rows = verification(support_row(target), bonus_row(7))
    assert accept(sampled((1, HALF)), rows, SAMPLED, uniforms(uniform)) == expected


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
def test_equal_distributions_recover_from_the_target(accept: Accept) -> None:
    """Only rounding can cause a rejection; the residual is then zero, and the token comes from the target."""
    probs = {4: 0.25, 5: 0.75}
    given = sampled((4, probs))
    rows = verification(support_row(probs), bonus_row(0))
    assert accept(given, rows, SAMPLED, uniforms(1 - 2.0**-53)).accepted_count == 1
    noise = uniforms(1.0)
    acceptance = accept(given, rows, SAMPLED, noise)
    assert (acceptance.accepted_count, acceptance.next_token) == (0, RECOVERED)
    assert noise.laws == [{}, pytest.approx(probs)]


@pytest.mark.parametrize("accept", [residual, block])
@pytest.mark.parametrize("one_hot", [True, False])
def test_rounding_on_the_wire_never_leaves_a_round_without_a_token(accept: Accept, one_hot: bool) -> None:
    """The target is certain of the proposed token, and its probability was rounded down."""
    given = proposal(4) if one_hot else sampled((4, {4: 1.0}))
    rows = verification(support_row({4: 1.0 - 6e-8}), bonus_row(0))
    assert accept(given, rows, SAMPLED, uniforms(1 - 1e-9)) == Acceptance(0, 4, RECOVERED)


ALL_RULES: list[Accept] = [greedy, strict, residual, block, typical(), logit_comparison, synthetic(0.5)]


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
def test_unfit_rows_are_refused(accept: Accept, given: Proposal, rows: Verification, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        accept(given, rows, GREEDY, uniforms(*[0.5] * len(given)))


UNUSABLE: list[tuple[list[Accept], Proposal, Verification, str]] = [
    ([greedy], proposal(1), token_rows(1, 2), "samples"),
    ([strict], proposal(1), verification(support_row({1: 0.5}, outside=2), bonus_row(0)), "support rows"),
    ([residual, block], proposal(1), verification(support_row({2: 0.4}, outside=5), bonus_row(7)), "token 1"),
    (
        [residual, block],
        sampled((1, {1: 0.6, 2: 0.3, 3: 0.1})),
        verification(support_row({1: 0.5, 2: 0.2}, outside=3), bonus_row(0)),
        "leaves out token 3",
    ),
    *(
        ([residual, block], sampled((1, HALF)), verification(support_row(broken), bonus_row(7)), "not a prob")
        for broken in ({1: float("nan"), 2: 0.5}, {1: 0.0, 2: 0.0})
    ),
    ([residual, block, typical()], proposal(1), token_rows(1, 2), "probabilities"),
    ([typical()], proposal(1), verification(support_row({1: 0.5}, outside=8), bonus_row(7)), "statistics"),
    ([synthetic(0.5)], proposal(), verification(bonus_row(1)), "statistics"),
    ([logit_comparison], proposal(1), verification(*map(ROWS_OF["support"], (1, 7))), "logits"),
]


@pytest.mark.parametrize(("rules_of_them", "given", "rows", "message"), UNUSABLE)
def test_rows_that_a_rule_cannot_use_are_refused(
    rules_of_them: list[Accept], given: Proposal, rows: Verification, message: str
) -> None:
    for accept in rules_of_them:
        with pytest.raises(ProtocolError, match=message):
            accept(given, rows, SAMPLED, uniforms(0.5))


@pytest.mark.parametrize(
    ("accept", "row"),
    [
        (accept, row)
        for accept in [*ALL_RULES, relax(rules.residual, [])]
        for row in (TokenRow(6), ROWS_OF["dense"](6), support_row({}, 6, statistics(argmax=6)))
        if accept is not strict or not isinstance(row, SupportRow)
    ],
)
def test_an_empty_proposal_is_answered(accept: Accept, row: TargetRow) -> None:
    assert accept(proposal(), verification(row), GREEDY, uniforms()) == Acceptance(0, 6, BONUS)


TYPICAL = [
    # entropy 0: the threshold is epsilon, 0.09, below delta, 0.3
    pytest.param(0.0, 0.0901, True, id="above epsilon"),
    pytest.param(0.0, 0.09, False, id="at epsilon"),
    # entropy 2: 0.3 * exp(-2) = 0.0406
    pytest.param(2.0, 0.0407, True, id="above delta exp(-entropy)"),
    pytest.param(2.0, 0.0405, False, id="below delta exp(-entropy)"),
    pytest.param(1.0, 0.0899, False, id="epsilon is lower at entropy 1"),
]


@pytest.mark.parametrize(("entropy", "prob", "kept"), TYPICAL)
def test_typical_acceptance(entropy: float, prob: float, kept: bool) -> None:
    row = support_row({1: prob}, outside=8, statistics=statistics(argmax=8, entropy=entropy))
    noise = uniforms(0.5)
    acceptance = typical()(proposal(1), verification(row, bonus_row(7)), SAMPLED, noise)
    assert (acceptance == Acceptance(1, 7, BONUS)) is kept
    assert (acceptance.next_token is RECOVERED) is not kept


def test_typical_acceptance_replaces_a_rejected_token_with_a_sample_of_the_target() -> None:
    """The rejected token itself may be sampled again."""
    row = support_row({1: 0.05}, outside=8, statistics=statistics(argmax=8, entropy=0.0))
    noise = uniforms(0.5)
    assert typical()(proposal(1), verification(row, bonus_row(7)), SAMPLED, noise).accepted_count == 0
    assert noise.laws == [pytest.approx({1: 0.05, 8: 0.95})]


@pytest.mark.parametrize(
    ("draft_logits", "target_logits", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], Acceptance(2, -1, NONE)),
        ([1.000005, 2.0], [1.0, 2.0], Acceptance(2, -1, NONE)),
        ([1.00002, 2.0], [1.0, 2.0], Acceptance(0, 6, RECOVERED)),
        ([1.0, 2.0], [1.0, 1.0], Acceptance(1, 6, RECOVERED)),
        ([float("nan"), 2.0], [1.0, 3.0], Acceptance(0, 6, RECOVERED)),
    ],
)
def test_logit_comparison(
    draft_logits: list[float], target_logits: list[float], expected: Acceptance
) -> None:
    told = [statistics(argmax=6, ranks=[1], logits=[logit]) for logit in target_logits]
    rows = verification(*[support_row({1: 0.4}, outside=8, statistics=each) for each in told], bonus_row(7))
    given = proposal(1, 1, logits=draft_logits)
    assert logit_comparison(given, rows, SAMPLED, uniforms(0.5, 0.5)) == expected


def _row(prob: float, rank: int = 1, max_prob: float = 0.8) -> SupportRow:
    """A row whose support is token 1; token 8 lies outside."""
    return support_row({1: prob}, 8, statistics(argmax=6, max_prob=max_prob, ranks=[rank]))


@pytest.mark.parametrize(
    ("prob", "rank", "kept"),
    [(0.26, 9, True), (0.25, 9, True), (0.24, 9, False), (0.26, 10, False), (0.75, 0, True)],
)
def test_a_token_inside_a_span_passes_by_rank_and_distance(prob: float, rank: int, kept: bool) -> None:
    """Among the top ten, and at most 0.5 below the maximum probability."""
    rows = verification(_row(prob, rank, max_prob=0.75), bonus_row(7))
    acceptance = relax(rules.residual, [True], delta=0.5)(proposal(1), rows, SAMPLED, uniforms(1.0))
    assert acceptance == (Acceptance(1, 7, BONUS) if kept else Acceptance(0, 6, RECOVERED))


def test_a_token_without_probability_never_passes_inside_a_span() -> None:
    """As one that a grammar forbids, where the most probable token has little more."""
    rows = verification(_row(0.0, rank=1, max_prob=0.4), bonus_row(7))
    acceptance = relax(rules.residual, [True], delta=0.5)(proposal(1), rows, SAMPLED, uniforms(1.0))
    assert acceptance == Acceptance(0, 6, RECOVERED)


# Token 1 passes inside always and outside when its uniform is below 0.3.
@pytest.mark.parametrize(
    ("thinking", "accepted_at", "expected"),
    [
        ([True, True, False], (0.9, 0.9, 0.1), Acceptance(3, 7, BONUS)),
        ([True, True, False], (0.9, 0.9, 0.9), Acceptance(2, 8, RECOVERED)),
        ([False, True, True], (0.1, 0.9, 0.9), Acceptance(3, 7, BONUS)),
        ([False, True, True], (0.9, 0.9, 0.9), Acceptance(0, 8, RECOVERED)),
        ([True, False, True], (0.9, 0.1, 0.9), Acceptance(3, 7, BONUS)),
        ([True, False, True], (0.9, 0.9, 0.9), Acceptance(1, 8, RECOVERED)),
        ([False, False, True], (0.1, 0.9, 0.9), Acceptance(1, 8, RECOVERED)),
    ],
)
def test_each_span_is_decided_by_its_own_rule(
    thinking: list[bool], accepted_at: tuple[float, ...], expected: Acceptance
) -> None:
    rows = verification(*[_row(0.3)] * 3, bonus_row(7))
    drawn = uniforms(*accepted_at)
    assert relax(rules.residual, thinking)(proposal(1, 1, 1), rows, SAMPLED, drawn) == expected


def test_a_rejection_inside_ends_the_run_with_the_most_probable_token() -> None:
    rows = verification(_row(0.3), _row(0.1), _row(0.3), bonus_row(7))
    drawn = uniforms(0.9, 0.9, 0.1)
    acceptance = relax(rules.residual, [True, True, False])(proposal(1, 1, 1), rows, SAMPLED, drawn)
    assert acceptance == Acceptance(1, 6, RECOVERED)


def test_the_wrapped_rule_receives_the_logits_of_its_span() -> None:
    rows = verification(_row(0.3), _row(0.3), bonus_row(7))
    given = proposal(1, 1, logits=[9.0, -1.0])
    drawn = uniforms(0.9, 0.9)
    accepted = relax(rules.logit_comparison, [True, False])(given, rows, SAMPLED, drawn)
    assert accepted == Acceptance(2, -1, NextToken.NONE)
    given = proposal(1, 1, logits=[9.0, 1.0])
    accepted = relax(rules.logit_comparison, [True, False])(given, rows, SAMPLED, drawn)
    assert accepted == Acceptance(1, 6, RECOVERED)


def _joint(schedule: tuple[float, ...]) -> list[float]:
    """The probability that the token at each position is accepted."""
    return list(itertools.accumulate(schedule, lambda reached, rate: reached * rate))


@pytest.mark.parametrize("token_count", [1, 2, 5, 16])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.5, 0.9, 1.0])
def test_rate_is_the_mean_over_positions(rate: float, token_count: int) -> None:
    schedule = schedule_of_rate(rate, token_count)
    assert len(set(schedule)) == 1
    assert len(schedule) == token_count
    assert sum(_joint(schedule)) / token_count == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.3), (1.0, 1.0), (0.5, 0.0, 0.0), (0.0, 0.0), (0.7,)])
def test_rates_are_unconditional(rates: tuple[float, ...]) -> None:
    assert _joint(schedule_of_rates(rates)) == pytest.approx(rates)


@pytest.mark.parametrize("token_count", [1, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_length_counts_the_token_after_the_run(token_count: int, share: float) -> None:
    length = 1 + share * token_count
    joint = _joint(schedule_of_length(length, token_count))
    assert 1 + sum(joint) == pytest.approx(length)
    # Minimum variance: each round has one of the two integer lengths next to the mean.
    assert sum(0 < value < 1 for value in joint) <= 1


SCHEDULE = (0.8, 0.5, 0.2)
ROWS = [support_row({}, 0, statistics(argmax=token)) for token in (11, 12, 13, 14)]


@pytest.mark.parametrize(
    ("accepted_at", "expected"),
    [
        ((0.79, 0.49, 0.19), Acceptance(3, 14, NextToken.BONUS)),
        ((0.8, 0.1, 0.1), Acceptance(0, 11, NextToken.RECOVERED)),
        ((0.1, 0.5, 0.1), Acceptance(1, 12, NextToken.RECOVERED)),
        ((0.1, 0.1, 0.2), Acceptance(2, 13, NextToken.RECOVERED)),
    ],
)
def test_acceptance(accepted_at: tuple[float, ...], expected: Acceptance) -> None:
    drawn = uniforms(*accepted_at)
    given = proposal(1, 2, 3)
    assert synthetic(*SCHEDULE)(given, verification(*ROWS), SAMPLED, drawn) == expected
    assert synthetic(*SCHEDULE)(given, token_rows(11, 12, 13, 14), GREEDY, drawn) == expected


def test_the_models_tokens_do_not_matter() -> None:
    rows = verification(*[support_row({1: 0.0}, 8, statistics(argmax=8))] * 2, ROWS[0])
    accepted = synthetic(1.0, 1.0)(proposal(1, 1), rows, SAMPLED, uniforms(0.999, 0.999))
    assert accepted == Acceptance(2, 11, NextToken.BONUS)


def test_a_shorter_proposal_uses_the_first_rates_and_a_longer_one_ends_with_them() -> None:
    assert synthetic(*SCHEDULE)(proposal(1), token_rows(1, 9), GREEDY, uniforms(0.79)).accepted_count == 1
    longer = synthetic(0.5)(proposal(1, 2), token_rows(1, 2, 9), GREEDY, uniforms(0.1, 0.1))
    assert longer == Acceptance(1, 2, NextToken.RECOVERED)


@pytest.mark.parametrize(
    ("option", "schedule"),
    [
        ({"synthetic_acceptance_rate": 0.25}, schedule_of_rate(0.25, 3)),
        ({"synthetic_acceptance_rates": (0.5, 0.25, 0.2)}, schedule_of_rates((0.5, 0.25, 0.2))),
        ({"synthetic_acceptance_length": 2.5}, schedule_of_length(2.5, 3)),
    ],
)
def test_options_become_a_schedule(option: dict[str, Any], schedule: tuple[float, ...]) -> None:
    options = SpeculativeConfig(rejection_sampling_strategy="synthetic", num_speculative_tokens=3, **option)
    rule = resolve(options, GREEDY)
    own = Round(proposal(1, 2, 3), token_rows(1, 2, 3, 9), GREEDY)
    for kept, rate in enumerate(schedule):
        at, below = ((*[-1.0] * kept, rate - less, 1.0, 1.0) for less in (0.0, 1e-9))
        assert rule.accept(own, uniforms(*at)).accepted_count == kept
        assert rule.accept(own, uniforms(*below)).accepted_count > kept


RELAXED = {"use_relaxed_acceptance_for_thinking": True}
TOKEN = RowKind.TOKEN
SUPPORT = RowKind.SUPPORT
DENSE = RowKind.DENSE
RATE = {"rejection_sampling_strategy": "synthetic", "synthetic_acceptance_rate": 0.5}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"'nucleus'; it must be one of greedy, residual, .*block"):
        find_strategy("nucleus")


@pytest.mark.parametrize("method", ["standalone", "ngram", "suffix", "eagle", "eagle3", "mtp"])
def test_default_rule(method: str) -> None:
    options = SpeculativeConfig(speculative_method=method)
    is_in_the_target = method in ("eagle", "eagle3", "mtp")
    assert resolve(options, SAMPLED).name == ("typical-acceptance" if is_in_the_target else "residual")
    assert resolve(options, GREEDY).name == "greedy"


def of(rule: str, **more: object) -> dict[str, Any]:
    return {"rejection_sampling_strategy": rule} | more


def _options(name: str, **more: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**of(name, **more) | (RATE if name == "synthetic" else {}))


@pytest.mark.parametrize("name", [each.name for each in STRATEGIES])
def test_temperature_zero_is_greedy_and_stays_synthetic(name: str) -> None:
    rule = resolve(_options(name), GREEDY)
    expected = ("synthetic", False) if name == "synthetic" else ("greedy", True)
    assert (rule.name, rule.lossless, rule.row_kind()) == (*expected, TOKEN)


def test_a_requested_kind_of_row() -> None:
    rule = resolve(_options("residual"), SAMPLED)
    assert rule.row_kind(DENSE) is DENSE
    with pytest.raises(InvalidRequestError, match="row_kind is token; residual needs support or dense rows"):
        rule.row_kind(TOKEN)
    with pytest.raises(InvalidRequestError, match="row_kind is support; strict needs token or dense rows"):
        resolve(_options("strict"), SAMPLED).row_kind(SUPPORT)
    with pytest.raises(InvalidRequestError, match="greedy needs support or dense rows"):
        resolve(_options("greedy"), SAMPLED).row_kind(TOKEN)


def test_supports() -> None:
    given = sampled((1, {3: 0.5, 1: 0.5}), (2, {2: 1.0}))
    for name, sent, wanted in (
        ("residual", given, [[3, 1], [2]]),
        ("block", proposal(1, 2), [[1], [2]]),
        ("typical", given, [[1], [2]]),
    ):
        supports = resolve(_options(name), SAMPLED).supports(sent)
        assert [ids.tolist() for ids in supports] == wanted


@pytest.mark.parametrize("name", ["residual", "typical-acceptance", "logit-comparison"])
def test_relaxed_acceptance_makes_a_rule_lossy_and_needs_statistics(name: str) -> None:
    rule = resolve(_options(name, **RELAXED), SAMPLED)
    assert not rule.lossless
    assert rule.needs_statistics


def test_relaxed_acceptance_has_no_effect_at_temperature_zero() -> None:
    rule = resolve(_options("residual", **RELAXED), GREEDY)
    assert rule.lossless
    assert not rule.is_relaxed


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (of(name, **RELAXED), f"the rule is {name}; it needs .* residual, typical")
        for name in ("strict", "block", "greedy")
    ),
    (RATE | RELAXED, "the rule is synthetic"),
    (of("synthetic"), "exactly one of .*; none of them is set"),
    (RATE | {"synthetic_acceptance_length": 1.5}, "_rate and synthetic_acceptance_length of them is set"),
    (
        of("synthetic", synthetic_acceptance_rates=[0.5, 0.5], synthetic_acceptance_length=2.0),
        "synthetic_acceptance_rates and synthetic_acceptance_length",
    ),
    ({"synthetic_acceptance_rates": [0.5, 0.5]}, "synthetic_acceptance_rates is set and the rule is residual"),
    ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length is set and the rule is residual"),
    (of("strict", synthetic_acceptance_rate=0.5), "synthetic_acceptance_rate is set and the rule is strict"),
    (of("synthetic", synthetic_acceptance_rates=[0.5]), "synthetic_acceptance_rates has 1 entries; it must have 2"),
    (of("synthetic", synthetic_acceptance_rates=[0.5, 0.6]), "no rate may be higher than the one before"),
    (of("synthetic", synthetic_acceptance_rates=[1.5, 0.6]), "each rate must be between 0 and 1"),
    (of("synthetic", synthetic_acceptance_length=3.5), "length is 3.5; it must be between 1 and 3"),
    (of("synthetic", synthetic_acceptance_length=0.5), "synthetic_acceptance_length is 0.5"),
    (of("logit-comparison", speculative_method="ngram"), "speculative_method is ngram; it needs a draft that has"),
    (of("logit-comparison", speculative_method="suffix"), "is suffix"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_conflicting_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve(SpeculativeConfig(**given), SAMPLED)


@pytest.mark.parametrize(
    ("options", "thinking", "accepted"),
    [
        ({}, (), 0),
        ({"typical_epsilon": 0.04}, (), 1),
        ({}, [True], 0),
        (RELAXED, (), 0),
        (RELAXED, [False], 0),
        (RELAXED, [True], 1),
        (RELAXED | {"relaxed_topk": 3}, [True], 0),
        (RELAXED | {"relaxed_delta": 0.4}, [True], 0),
    ],
)
def test_options_reach_the_rule(options: dict[str, Any], thinking: Sequence[bool], accepted: int) -> None:
    row = support_row({1: 0.05}, outside=8, statistics=statistics(argmax=8, ranks=[3], max_prob=0.5))
    own = Round(proposal(1), verification(row, bonus_row(7)), SAMPLED, thinking)
    assert (
        resolve(_options("typical", **options), SAMPLED).accept(own, uniforms(0.5)).accepted_count == accepted
    )
