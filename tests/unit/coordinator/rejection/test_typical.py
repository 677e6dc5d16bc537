"""`typical-acceptance` at positions whose outcome is known."""

from __future__ import annotations

import pytest

from coordinator.rejection import RowError
from tandem.types import Acceptance
from tests.unit.coordinator.rejection.builders import (
    BONUS,
    RECOVERED,
    SAMPLED,
    bonus_row,
    dense_row,
    proposal,
    statistics,
    support_row,
    typical,
    uniforms,
    verification,
)

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


def test_typical_acceptance_with_other_thresholds() -> None:
    row = support_row({1: 0.2}, outside=8, statistics=statistics(argmax=8, entropy=0.0))
    rows = verification(row, bonus_row(7))
    assert typical(epsilon=0.5)(proposal(1), rows, SAMPLED, uniforms(0.5)).accepted_count == 0
    assert typical(epsilon=0.5, delta=0.1)(proposal(1), rows, SAMPLED, uniforms(0.5)).accepted_count == 1


def test_typical_acceptance_computes_the_entropy_of_dense_rows() -> None:
    """Uniform over 20: entropy ln 20, threshold 0.3 / 20 = 0.015, and each token has 0.05."""
    flat = verification(*[dense_row([0.05] * 20)] * 2)
    assert typical()(proposal(3), flat, SAMPLED, uniforms(0.5)).accepted_count == 1
    assert typical(delta=1.01)(proposal(3), flat, SAMPLED, uniforms(0.5)).accepted_count == 0


def test_typical_acceptance_needs_statistics() -> None:
    rows = verification(support_row({1: 0.5}, outside=8), bonus_row(7))
    with pytest.raises(RowError, match="statistics"):
        typical()(proposal(1), rows, SAMPLED, uniforms(0.5))
