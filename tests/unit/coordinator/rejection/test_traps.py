"""Common mistakes in rejection sampling, each with a test that detects it."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rejection import KEYED, Round, RowError
from coordinator.rejection.rounds import Race
from tandem.sampling.noise import Purpose, recovery_keys, target_keys, token_uniforms, uniform
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification
from tests.unit.coordinator.rejection.builders import (
    SAMPLED,
    Accept,
    block,
    bonus_row,
    proposal,
    residual,
    sampled,
    support_row,
    uniforms,
    verification,
)
from tests.unit.coordinator.rejection.enumeration import (
    Setting,
    Tokens,
    output_distribution,
    target_distribution,
    total_variation,
)

RULES = [residual, block]


# Trap: the draft samples from one distribution and another one is verified.


@pytest.mark.parametrize("accept", RULES)
def test_a_support_that_leaves_out_a_draft_token_is_refused(accept: Accept) -> None:
    """A target's row on a truncated support does not suffice for a draft that was not truncated."""
    given = sampled((1, {1: 0.6, 2: 0.3, 3: 0.1}))
    rows = verification(support_row({1: 0.5, 2: 0.2}, outside=3), bonus_row(0))
    with pytest.raises(RowError, match="leaves out token 3"):
        accept(given, rows, SAMPLED, uniforms(0.5))


# Trap: the draft drops a token with a low probability after drawing it, and the target samples in its place.


TARGET_PROBS, DRAFT_PROBS = [0.2, 0.3, 0.5], [0.7, 0.2, 0.1]


def _first_unsure(tokens: Tokens, proposed: Tokens) -> int:
    """Count the tokens before the first with a draft probability below 0.3."""
    return next((i for i, token in enumerate(proposed) if DRAFT_PROBS[token] < 0.3), len(proposed))


@pytest.mark.parametrize("accept", RULES)
def test_a_proposal_may_end_with_an_unlikely_token(accept: Accept) -> None:
    setting = Setting(
        lambda tokens: TARGET_PROBS,
        lambda tokens: DRAFT_PROBS,
        token_count=2,
        sent_count=lambda tokens, proposed: min(_first_unsure(tokens, proposed) + 1, len(proposed)),
    )
    actual, expected = output_distribution(accept, setting, 2), target_distribution(setting.target, 2)
    assert total_variation(actual, expected) < 1e-12


# Trap: the noise of the proposal is reused for acceptance, or that of acceptance for recovery.


def test_the_coordinator_draws_with_the_keys_of_the_round() -> None:
    ids = np.arange(50)
    sampling = SamplingParams(seed=3)
    own = Round(Proposal(20, (1,) * 8), Verification(20, ()), sampling)
    assert KEYED.uniform(own, 2) == uniform(3, 22, Purpose.ACCEPTANCE, 20)
    winner = token_uniforms(recovery_keys(3, 20, 9)[4:5], 50)[0].argmax()
    assert KEYED.sample([Race(own, 4, ids, np.ones(50), -1, 0.0)]) == [winner]
    empty = Round(Proposal(20), Verification(20, ()), sampling)
    winner = token_uniforms(target_keys(3, 20, 1), 50)[0].argmax()
    assert KEYED.sample([Race(empty, 0, ids, np.ones(50), -1, 0.0)]) == [winner]


# Trap: a residual that sums to zero.


@pytest.mark.parametrize("accept", RULES)
def test_equal_distributions_recover_from_the_target(accept: Accept) -> None:
    """Only rounding can cause a rejection; the token then comes from the target's distribution."""
    probs = {4: 0.25, 5: 0.75}
    given, rows = sampled((4, probs)), verification(support_row(probs), bonus_row(0))
    assert accept(given, rows, SAMPLED, uniforms(1 - 2.0**-53)).accepted_count == 1
    noise = uniforms(1.0)
    acceptance = accept(given, rows, SAMPLED, noise)
    assert (acceptance.accepted_count, acceptance.next_token) == (0, NextToken.RECOVERED)
    assert noise.laws == [{}, pytest.approx(probs)]


@pytest.mark.parametrize("accept", RULES)
@pytest.mark.parametrize("one_hot", [True, False])
def test_rounding_on_the_wire_never_leaves_a_round_without_a_token(accept: Accept, one_hot: bool) -> None:
    """The target is certain of the proposed token, and its probability was rounded down."""
    given = proposal(4) if one_hot else sampled((4, {4: 1.0}))
    rows = verification(support_row({4: 1.0 - 6e-8}), bonus_row(0))
    assert accept(given, rows, SAMPLED, uniforms(1 - 1e-9)) == Acceptance(0, 4, NextToken.RECOVERED)
