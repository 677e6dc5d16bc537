"""The rows that a round requests from the target, and those that no model of the vocabulary can produce."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tandem.acceptance.strategies import resolve
from tandem.config import SpeculativeConfig
from tandem.errors import ProtocolError
from tandem.model.types import (
    Delta,
    DenseRow,
    Proposal,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
)
from tandem_coordinator.transport.target_client import check_logprobs, check_rows

EMPTY = Proposal(3)
FULL = Proposal(3, (7, 8))


@pytest.mark.parametrize(
    ("rule", "kind", "proposal", "expected"),
    [
        ("residual", RowKind.SUPPORT, EMPTY, RowKind.TOKEN),
        ("residual", RowKind.SUPPORT, FULL, RowKind.SUPPORT),
        ("typical-acceptance", RowKind.SUPPORT, EMPTY, RowKind.SUPPORT),
        ("residual", RowKind.DENSE, EMPTY, RowKind.DENSE),
        ("strict", RowKind.TOKEN, FULL, RowKind.TOKEN),
    ],
)
def test_an_empty_proposal_requests_a_sample_only(
    rule: str, kind: RowKind, proposal: Proposal, expected: RowKind
) -> None:
    resolved = resolve(SpeculativeConfig(rejection_sampling_strategy=rule), SamplingParams())
    assert resolved.step(Delta(3, ()), proposal, kind).row_kind is expected


SIZE = 10
STATISTICS = RowStatistics(-1e-9, 0.5, SIZE - 1, np.array([0, 1]), np.array([1.0, -math.inf], np.float32))
SUPPORT = SupportRow(np.array([1, 2]), np.array([0.5, 0.0]), 0.5, SIZE - 1, STATISTICS)


def dense(*first: float, size: int = SIZE) -> DenseRow:
    """The first logits, and zeros for the others."""
    logits = np.zeros(size, np.float32)
    logits[: len(first)] = first
    return DenseRow(logits)


GOOD: list[TargetRow] = [
    TokenRow(0),
    TokenRow(SIZE - 1),
    SUPPORT,
    SupportRow(np.array([], int), np.array([]), 1.0, 3),
    # No token outside: the claimed mass there does not count.
    replace(SUPPORT, outside_token_id=-1, outside_mass=math.nan),
    replace(SUPPORT, outside_prob=0.5),
    replace(SUPPORT, outside_prob=0.0),
    replace(SUPPORT, outside_token_id=-1, outside_mass=0.0, outside_prob=0.0),
    dense(-math.inf, -math.inf),
]

BAD: list[tuple[TargetRow, str]] = [
    (TokenRow(SIZE), "it sent token id 10; ids must be in 0..9"),
    (TokenRow(-1), "it sent token id -1; ids must be in 0..9"),
    (replace(SUPPORT, outside_token_id=SIZE), "it sent token id 10; ids must be in 0..9"),
    (replace(SUPPORT, probs=np.array([1.0, math.nan])),
        "a row's lowest probability is nan and their sum is nan; no probability may be negative, and the sum must be a "
        "positive number"),
    (replace(SUPPORT, probs=np.array([1.0, -0.5])), "lowest probability is -0.5 and their sum is 1;"),
    (replace(SUPPORT, probs=np.array([1.0, math.inf])), "their sum is inf;"),
    *((replace(SUPPORT, outside_prob=prob),
        f"a row's token outside the support has the probability {prob:g}; it must be between 0 and the mass there, 0.5")
        for prob in (-0.5, 0.5001, math.nan, math.inf)),
    (replace(SUPPORT, outside_token_id=-1, outside_prob=0.1), "between 0 and the mass there, 0"),
    (replace(SUPPORT, outside_mass=-0.5), "lowest probability is -0.5"),
    (replace(SUPPORT, outside_mass=math.nan), "their sum is nan;"),
    (replace(SUPPORT, probs=np.zeros(2), outside_token_id=-1), "their sum is 0;"),
    (replace(SUPPORT, statistics=replace(STATISTICS, argmax_token_id=SIZE)),
        "it sent token id 10; ids must be in 0..9"),
    (replace(SUPPORT, statistics=replace(STATISTICS, entropy=math.nan)),
        "a row's entropy is nan; it must be a finite number"),
    (replace(SUPPORT, statistics=replace(STATISTICS, max_prob=math.inf)),
        "a row's highest probability is inf; it must be a finite number"),
    (replace(SUPPORT, statistics=replace(STATISTICS, logits=np.array([1.0, math.nan], np.float32))),
        "a row's highest logit in its support is nan; it must be a number below infinity"),
    (dense(size=SIZE + 1), "a dense row holds 11 logits; it must hold 10, one for each token of the vocabulary"),
    (dense(size=0), "a dense row holds 0 logits; it must hold 10"),
    (dense(1.0, math.nan), "a dense row's highest logit is nan; it must be a finite number"),
    (dense(math.inf), "a dense row's highest logit is inf; it must be a finite number"),
    (dense(*[-math.inf] * SIZE), "a dense row's highest logit is -inf; it must be a finite number"),
]  # fmt: skip


@pytest.mark.parametrize("row", GOOD)
def test_valid_rows_are_accepted(row: TargetRow) -> None:
    check_rows(Verification(0, (row,)), SIZE)


@pytest.mark.parametrize(("row", "sentence"), BAD)
def test_invalid_rows_are_refused(row: TargetRow, sentence: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        check_rows(Verification(0, (SUPPORT, row)), SIZE)
    assert str(refusal.value).startswith("target service: ")
    assert sentence in str(refusal.value)


def test_missing_statistics_are_refused_if_requested() -> None:
    without = Verification(0, (SUPPORT, replace(SUPPORT, statistics=None)))
    check_rows(without, SIZE)
    with pytest.raises(ProtocolError, match="a row came without statistics; they were asked for"):
        check_rows(without, SIZE, with_statistics=True)


OF_SUPPORT = RowLogprobs((3, 4), (-0.5, -1.0), (-2.0, -math.inf, -3.0))
OF_TOKEN = RowLogprobs((3, 4), (-0.5, -1.0), (-0.5,))
WANTED = TargetOptions("r", SamplingParams(), logprobs=2)


def test_log_probabilities_beside_rows_are_accepted() -> None:
    check_logprobs(Verification(0, (SUPPORT, SUPPORT), logprobs=(OF_SUPPORT, OF_SUPPORT)), WANTED, SIZE)
    check_logprobs(Verification(0, (TokenRow(3),), logprobs=(OF_TOKEN,)), WANTED, SIZE)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ((), "log probabilities of 0 rows came with 1 rows"),
        ((OF_TOKEN, OF_TOKEN), "log probabilities of 2 rows came with 1 rows"),
        ((OF_SUPPORT,), "there must be 2, 2 and 1"),
        ((replace(OF_TOKEN, top_token_ids=(3,)),), "a row came with 1 ids"),
        ((replace(OF_TOKEN, top_token_ids=(3, SIZE)),), f"it sent token id {SIZE}"),
        (
            (replace(OF_TOKEN, token_logprobs=(math.nan,)),),
            "it sent the log probability nan; it must be at most 0",
        ),
        (
            (replace(OF_TOKEN, top_logprobs=(0.5, -1.0)),),
            "it sent the log probability 0.5; it must be at most 0",
        ),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused(found: tuple[RowLogprobs, ...], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=r"^target service: ") as refusal:
        check_logprobs(Verification(0, (TokenRow(3),), logprobs=found), WANTED, SIZE)
    assert sentence in str(refusal.value)


SAMPLED = TargetOptions("r", SamplingParams(), sampled_logprobs=True)


def sampled(*numbers: float) -> RowLogprobs:
    return RowLogprobs((), (), (), raw_logprobs=numbers, processed_logprobs=numbers)


def test_sampled_log_probabilities_are_of_all_tokens_that_a_row_names() -> None:
    without = replace(SUPPORT, statistics=None)
    count = len(SUPPORT.token_ids) + 1
    numbers = [-1.0] * count
    check_logprobs(Verification(0, (without,), logprobs=(sampled(*numbers),)), SAMPLED, SIZE)
    check_logprobs(Verification(0, (SUPPORT,), logprobs=(sampled(*numbers, -math.inf),)), SAMPLED, SIZE)
    check_logprobs(Verification(0, (TokenRow(3),), logprobs=(sampled(-1.0),)), SAMPLED, SIZE)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ((), "log probabilities of 0 rows came with 1 rows"),
        ((sampled(),), "a row came with 0 raw and 0 processed log probabilities"),
        ((sampled(-1.0, -1.0),), "there must be 1 of each"),
        ((replace(sampled(-1.0), processed_logprobs=()),), "a row came with 1 raw and 0 processed"),
        ((sampled(math.nan),), "it sent the log probability nan; it must be at most 0"),
        ((sampled(0.5),), "it sent the log probability 0.5; it must be at most 0"),
    ],
)
def test_sampled_log_probabilities_that_do_not_fit_are_refused(
    found: tuple[RowLogprobs, ...], sentence: str
) -> None:
    with pytest.raises(ProtocolError, match=r"^target service: ") as refusal:
        check_logprobs(Verification(0, (TokenRow(3),), logprobs=found), SAMPLED, SIZE)
    assert sentence in str(refusal.value)
