"""Relaxed acceptance for thinking: inside a span by rank and distance, outside by the wrapped rule."""

from __future__ import annotations

import pytest

from coordinator.rejection.rules import logit_comparison, residual
from tandem.types import Acceptance, NextToken, SupportRow
from tests.unit.coordinator.rejection.builders import (
    BONUS,
    RECOVERED,
    SAMPLED,
    bonus_row,
    dense_row,
    proposal,
    relaxed,
    statistics,
    support_row,
    uniforms,
    verification,
)


def _row(prob: float, rank: int = 1, max_prob: float = 0.8, argmax: int = 6) -> SupportRow:
    """A row whose support is token 1; token 8 lies outside."""
    row_statistics = statistics(argmax=argmax, max_prob=max_prob, ranks=[rank], logits=[0.0])
    return support_row({1: prob}, outside=8, statistics=row_statistics)


@pytest.mark.parametrize(
    ("prob", "rank", "kept"),
    [
        (0.26, 9, True),
        (0.25, 9, True),
        (0.24, 9, False),
        (0.26, 10, False),
        (0.75, 0, True),
    ],
)
def test_a_token_inside_a_span_passes_by_rank_and_distance(prob: float, rank: int, kept: bool) -> None:
    """Among the top ten, and at most 0.5 below the maximum probability."""
    rows = verification(_row(prob, rank, max_prob=0.75), bonus_row(7))
    acceptance = relaxed(residual, [True], delta=0.5)(proposal(1), rows, SAMPLED, uniforms(1.0))
    assert acceptance == (Acceptance(1, 7, BONUS) if kept else Acceptance(0, 6, RECOVERED))


def test_the_wrapped_rule_decides_outside_spans() -> None:
    rows = verification(_row(0.3), bonus_row(7))
    for uniform, expected in ((0.29, Acceptance(1, 7, BONUS)), (0.31, Acceptance(0, 8, RECOVERED))):
        drawn = uniforms(uniform)
        assert relaxed(residual, [False])(proposal(1), rows, SAMPLED, drawn) == expected


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
        ([False, False, False], (0.1, 0.1, 0.1), Acceptance(3, 7, BONUS)),
        ([True, True, True], (0.9, 0.9, 0.9), Acceptance(3, 7, BONUS)),
    ],
)
def test_each_span_is_decided_by_its_own_rule(
    thinking: list[bool], accepted_at: tuple[float, ...], expected: Acceptance
) -> None:
    rows = verification(*[_row(0.3)] * 3, bonus_row(7))
    drawn = uniforms(*accepted_at)
    assert relaxed(residual, thinking)(proposal(1, 1, 1), rows, SAMPLED, drawn) == expected


def test_a_rejection_inside_ends_the_run_with_the_most_probable_token() -> None:
    rows = verification(_row(0.3), _row(0.1), _row(0.3), bonus_row(7))
    drawn = uniforms(0.9, 0.9, 0.1)
    acceptance = relaxed(residual, [True, True, False])(proposal(1, 1, 1), rows, SAMPLED, drawn)
    assert acceptance == Acceptance(1, 6, RECOVERED)


def test_the_wrapped_rule_answers_an_empty_proposal() -> None:
    assert relaxed(residual, [])(proposal(), verification(bonus_row(7)), SAMPLED, uniforms()) == Acceptance(
        0, 7, BONUS
    )


def test_the_wrapped_rule_receives_the_logits_of_its_span() -> None:
    rows = verification(_row(0.3), _row(0.3), bonus_row(7))
    given = proposal(1, 1, logits=[9.0, -1.0])
    drawn = uniforms(0.9, 0.9)
    accepted = relaxed(logit_comparison, [True, False])(given, rows, SAMPLED, drawn)
    assert accepted == Acceptance(2, -1, NextToken.NONE)
    given = proposal(1, 1, logits=[9.0, 1.0])
    accepted = relaxed(logit_comparison, [True, False])(given, rows, SAMPLED, drawn)
    assert accepted == Acceptance(1, 6, RECOVERED)


def test_dense_rows_are_ranked_by_the_rule() -> None:
    row = dense_row([0.05, 0.4, 0.25, 0.3])
    rows = verification(row, row)
    for token, kept in ((1, True), (3, True), (2, False), (0, False)):
        accepted = relaxed(residual, [True], top_k=2)(proposal(token), rows, SAMPLED, uniforms(1.0))
        assert accepted.accepted_count == int(kept)
        if not kept:
            assert accepted.next_token_id == 1
