"""Rounds that a target leads by its own head's proposals emit the target's distribution, summed over all branches.

The outcome is read off the step that the target begins by itself, so this holds for what it decides, for what it tells
and for what it goes on with.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tandem.acceptance import rounds
from tandem.acceptance.rounds import Noise
from tandem.acceptance.strategies import rule_of
from tandem.engine.interface import RowRequest, decide_own
from tandem.model.types import (
    Acceptance,
    AcceptanceTerms,
    Delta,
    NextToken,
    Proposal,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    Verification,
)
from tests.unit.tandem.acceptance.builders import GREEDY, SAMPLED, Accept, block, residual
from tests.unit.tandem.acceptance.enumeration import output_distribution, target_distribution
from tests.unit.tandem.acceptance.test_exactness import PAIRS, SETTINGS, TOLERANCE

RULES = {"residual": residual, "block": block}


def begun_behind(
    rule: str, proposal: Proposal, verification: Verification, sampling: SamplingParams, *ends: int
) -> Delta | None:
    """The delta with which a target goes on behind a proposal of its own head's; None where it does not."""
    own = rule_of(AcceptanceTerms(rule), sampling)
    base = verification.base_length
    asked = own.own_step(Delta(base, (0,)), own.row_kinds[0], 1, 2, 4)
    options = TargetOptions("r", sampling, 64, end_token_ids=ends)
    request = RowRequest(asked, options, rule=own)
    request.leading.ask(asked)
    request = request.with_proposal(proposal)
    (acceptance,) = decide_own([request], [verification])
    told, following = request.go_on(verification, acceptance)
    assert (told.goes_on is None) == (following is None)
    if told.goes_on is None or following is None:
        return None
    assert following.step.delta == told.goes_on.delta
    assert following.step.own_tokens == told.goes_on.own_tokens == 4
    return told.goes_on.delta


def leading(rule: str) -> Accept:
    def accept(
        proposal: Proposal, verification: Verification, sampling: SamplingParams, noise: Noise
    ) -> Acceptance:
        with patch.object(rounds, "KEYED", noise):
            delta = begun_behind(rule, proposal, verification, sampling)
        assert delta is not None
        (token_id,) = delta.token_ids
        return Acceptance(delta.base_length - verification.base_length, token_id, NextToken.RECOVERED)

    return accept


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name, (setting, _) in SETTINGS.items() if not setting.dense])
def test_led_rounds_have_the_targets_distribution(rule: str, name: str) -> None:
    setting, length = SETTINGS[name]
    actual = output_distribution(leading(rule), setting, length)
    expected = target_distribution(setting.target, length)
    for tokens in actual.keys() | expected.keys():
        assert actual.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=TOLERANCE), tokens


def test_a_small_mistake_of_a_led_round_is_detected() -> None:
    setting, length = SETTINGS[f"{next(iter(PAIRS))}, 1 proposed"]
    honest = leading("residual")

    def wrong(
        proposal: Proposal, verification: Verification, sampling: SamplingParams, noise: Noise
    ) -> Acceptance:
        found = honest(proposal, verification, sampling, noise)
        is_rejected = found.accepted_count < len(proposal)
        return Acceptance(found.accepted_count, 0 if is_rejected else found.next_token_id, found.next_token)

    actual = output_distribution(wrong, setting, length)
    expected = target_distribution(setting.target, length)
    assert any(abs(actual.get(tokens, 0.0) - expected[tokens]) > 0.01 for tokens in expected)


@pytest.mark.parametrize(("rule", "sampling"), [("greedy", GREEDY), ("strict", SAMPLED)])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_token_rows_decide_by_equality(rule: str, sampling: SamplingParams, accepted: int) -> None:
    says = (7, 8, 9, 10)
    proposed = tuple(each if place < accepted else each + 50 for place, each in enumerate(says[:3]))
    verification = Verification(5, tuple(TokenRow(each) for each in says))
    delta = begun_behind(rule, Proposal(5, proposed), verification, sampling)
    assert delta == Delta(5 + accepted, (says[accepted],))


@pytest.mark.parametrize("end", [7, 8])
def test_a_target_does_not_go_on_behind_an_end(end: int) -> None:
    verification = Verification(5, (TokenRow(7), TokenRow(8)))
    assert begun_behind("strict", Proposal(5, (7,)), verification, SAMPLED, end) is None


def test_a_target_does_not_go_on_where_nothing_fits_behind() -> None:
    verification = Verification(62, (TokenRow(7), TokenRow(8)))
    assert begun_behind("strict", Proposal(62, (7,)), verification, SAMPLED) is None
    assert begun_behind("strict", Proposal(62, (9,)), verification, SAMPLED) == Delta(62, (7,))


@pytest.mark.parametrize("rule", ["logit-comparison", "synthetic"])
def test_what_the_coordinator_alone_decides_is_not_led(rule: str) -> None:
    own = rule_of(AcceptanceTerms(rule), SAMPLED)
    assert own.own_step(Delta(0, (1,)), RowKind.SUPPORT, 1, 2, 4).lead == 0
