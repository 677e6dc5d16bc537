"""Resolution of options to a rule: names, defaults, kinds of rows, and refused combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.rejection import STRATEGIES, Round, RuleError, find_strategy, resolve
from tandem.config import SpeculativeConfig
from tandem.types import RowKind
from tests.unit.coordinator.rejection.builders import (
    GREEDY,
    SAMPLED,
    bonus_row,
    proposal,
    sampled,
    statistics,
    support_row,
    uniforms,
    verification,
)

RELAXED = {"use_relaxed_acceptance_for_thinking": True}
TOKEN, SUPPORT, DENSE = RowKind.TOKEN, RowKind.SUPPORT, RowKind.DENSE
RATE = {"rejection_sampling_strategy": "synthetic", "synthetic_acceptance_rate": 0.5}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RuleError, match=r"'nucleus'; it must be one of greedy, residual, .*block"):
        find_strategy("nucleus")


@pytest.mark.parametrize("method", ["standalone", "ngram", "suffix", "eagle", "eagle3", "mtp"])
def test_default_rule(method: str) -> None:
    options = SpeculativeConfig(speculative_method=method)
    is_in_the_target = method in ("eagle", "eagle3", "mtp")
    assert resolve(options, SAMPLED).name == ("typical-acceptance" if is_in_the_target else "residual")
    assert resolve(options, GREEDY).name == "greedy"


# For a sampled request: target rows, draft rows, lossless, needs statistics.
TABLE: dict[str, tuple[tuple[RowKind, ...], RowKind, bool, bool]] = {
    "greedy": ((SUPPORT, DENSE), TOKEN, False, True),
    "residual": ((SUPPORT, DENSE), SUPPORT, True, False),
    "block": ((SUPPORT, DENSE), SUPPORT, True, False),
    "strict": ((TOKEN, DENSE), TOKEN, True, False),
    "typical-acceptance": ((SUPPORT, DENSE), SUPPORT, False, True),
    "logit-comparison": ((SUPPORT, DENSE), TOKEN, False, True),
    "synthetic": ((SUPPORT, DENSE), TOKEN, False, True),
}


def of(rule: str, **more: object) -> dict[str, Any]:
    return {"rejection_sampling_strategy": rule} | more


def _options(name: str, **more: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**of(name, **more) | (RATE if name == "synthetic" else {}))


@pytest.mark.parametrize("name", TABLE)
def test_the_rows_of_a_sampled_request(name: str) -> None:
    row_kinds, draft_row_kind, lossless, statistics = TABLE[name]
    rule = resolve(_options(name), SAMPLED)
    assert rule.name == name
    assert rule.row_kinds == row_kinds
    assert rule.row_kind() is row_kinds[0]
    assert rule.strategy.draft_row_kind is draft_row_kind
    assert rule.lossless is lossless
    assert rule.needs_statistics is statistics
    assert rule.strategy.needs_token_logits is (name == "logit-comparison")


def test_the_table_is_complete() -> None:
    assert set(TABLE) == {strategy.name for strategy in STRATEGIES}


@pytest.mark.parametrize("name", [name for name in TABLE if name != "synthetic"])
def test_temperature_zero_is_greedy(name: str) -> None:
    rule = resolve(_options(name), GREEDY)
    assert rule.name == "greedy"
    assert rule.lossless
    assert rule.row_kind() is TOKEN


def test_temperature_zero_stays_synthetic() -> None:
    rule = resolve(_options("synthetic"), GREEDY)
    assert (rule.name, rule.row_kind(), rule.lossless) == ("synthetic", TOKEN, False)


def test_a_requested_kind_of_row() -> None:
    rule = resolve(_options("residual"), SAMPLED)
    assert rule.row_kind(DENSE) is DENSE
    with pytest.raises(RuleError, match="row_kind is token; residual needs support or dense rows"):
        rule.row_kind(TOKEN)
    with pytest.raises(RuleError, match="row_kind is support; strict needs token or dense rows"):
        resolve(_options("strict"), SAMPLED).row_kind(SUPPORT)
    with pytest.raises(RuleError, match="greedy needs support or dense rows"):
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
    with pytest.raises(RuleError, match=message):
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
