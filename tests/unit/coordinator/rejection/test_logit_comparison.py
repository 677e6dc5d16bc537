"""`logit-comparison` at positions whose outcome is known."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rejection import RowError
from tandem.types import (
    Acceptance,
    SamplingParams,
    TargetRow,
)
from tests.unit.coordinator.rejection.builders import (
    NONE,
    RECOVERED,
    SAMPLED,
    bonus_row,
    dense_row,
    logit_comparison,
    proposal,
    statistics,
    support_row,
    uniforms,
    verification,
)


def _logit_row(token: int, logit: float) -> TargetRow:
    return support_row({token: 0.4}, outside=8, statistics=statistics(argmax=6, ranks=[1], logits=[logit]))


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
    rows = verification(*[_logit_row(1, logit) for logit in target_logits], bonus_row(7))
    given = proposal(1, 1, logits=draft_logits)
    assert logit_comparison(given, rows, SAMPLED, uniforms(0.5, 0.5)) == expected


def test_logit_comparison_of_dense_rows_compares_logits_before_temperature() -> None:
    row = dense_row([0.1, 0.7, 0.2])
    cold = SamplingParams(temperature=0.1)
    given = proposal(1, logits=[float(np.log(0.7)) - 0.01])
    assert logit_comparison(given, verification(row, row), cold, uniforms(0.5)).accepted_count == 1
    given = proposal(2, logits=[float(np.log(0.2)) + 0.01])
    assert logit_comparison(given, verification(row, row), cold, uniforms(0.5)) == Acceptance(0, 1, RECOVERED)


def test_logit_comparison_needs_the_drafts_logits() -> None:
    with pytest.raises(RowError, match="logits"):
        logit_comparison(proposal(1), verification(_logit_row(1, 0), bonus_row(7)), SAMPLED, uniforms(0.5))
