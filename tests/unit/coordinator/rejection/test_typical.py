"""`typical-acceptance` at positions whose outcome is known."""

from __future__ import annotations

import pytest

from coordinator.rejection import (
    RowError,
    typical,
)
from tandem.types import (
    Acceptance,
)
from tests.unit.coordinator.rejection.builders import (
    SAMPLED,
    bonus_row,
    dense_row,
    proposal,
    statistics,
    support_row,
    uniforms,
    verification,
)
from tests.unit.coordinator.rejection.rule_parts import BONUS, RECOVERED

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
    acceptance = typical.accept(proposal(1), verification(row, bonus_row(7)), SAMPLED, uniforms(0.5))
    assert acceptance == (Acceptance(1, 7, BONUS) if kept else Acceptance(0, 8, RECOVERED))


def test_typical_acceptance_replaces_a_rejected_token_with_a_sample_of_the_target() -> None:
    """The rejected token itself may be sampled again."""
    row = support_row({1: 0.05}, outside=8, statistics=statistics(argmax=8, entropy=0.0))
    for recover, expected in ((0.04, 1), (0.06, 8)):
        drawn = uniforms(0.5, recover=recover)
        assert (
            typical.accept(proposal(1), verification(row, bonus_row(7)), SAMPLED, drawn).next_token_id
            == expected
        )


def test_typical_acceptance_with_other_thresholds() -> None:
    row = support_row({1: 0.2}, outside=8, statistics=statistics(argmax=8, entropy=0.0))
    rows = verification(row, bonus_row(7))
    assert typical.accept(proposal(1), rows, SAMPLED, uniforms(0.5), epsilon=0.5).accepted_count == 0
    assert (
        typical.accept(proposal(1), rows, SAMPLED, uniforms(0.5), epsilon=0.5, delta=0.1).accepted_count == 1
    )


def test_typical_acceptance_computes_the_entropy_of_dense_rows() -> None:
    """Uniform over 20: entropy ln 20, threshold 0.3 / 20 = 0.015, and each token has 0.05."""
    flat = verification(*[dense_row([0.05] * 20)] * 2)
    assert typical.accept(proposal(3), flat, SAMPLED, uniforms(0.5)).accepted_count == 1
    assert typical.accept(proposal(3), flat, SAMPLED, uniforms(0.5), delta=1.01).accepted_count == 0


def test_typical_acceptance_needs_statistics() -> None:
    rows = verification(support_row({1: 0.5}, outside=8), bonus_row(7))
    with pytest.raises(RowError, match="statistics"):
        typical.accept(proposal(1), rows, SAMPLED, uniforms(0.5))
