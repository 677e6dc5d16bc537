"""Rows describe the target's distribution exactly, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.interface import RowRequest
from tandem.engine.rows import verifications
from tandem.sampling.noise import recovery_keys, sample, target_keys
from tandem.sampling.warping import warp
from tandem.types import Delta, DenseRow, IntArray, RowKind, SamplingParams, SupportRow, TokenRow, VerifyStep
from tests.unit.engine.verified import verified

VOCABULARY_SIZE = 50
NO_IDS: IntArray = np.empty(0, dtype=np.int64)


def logits_of(row_count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(row_count, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def request(
    kind: RowKind,
    row_count: int,
    sampling: SamplingParams,
    supports: tuple[IntArray, ...] = (),
    *,
    with_statistics: bool = False,
) -> RowRequest:
    step = VerifyStep(Delta(10, [1] * row_count), kind, row_count, supports, with_statistics)
    return RowRequest(step, sampling)


WARPED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5)
GREEDY = SamplingParams(temperature=0.0)


def test_sampled_token_rows_are_drawn_with_the_shared_noise() -> None:
    logits = logits_of(3)
    (verification,) = verified([request(RowKind.TOKEN, 3, WARPED)], logits)
    keys = torch.from_numpy(target_keys(WARPED.seed, verification.base_length, 3))
    expected = sample(warp(logits, [WARPED] * 3), keys).tolist()
    assert verification.rows == tuple(TokenRow(token_id) for token_id in expected)


def test_support_rows_split_the_distribution_into_inside_and_outside() -> None:
    logits = logits_of(3)
    supports = (np.array([3, 9, 41]), np.array([7]))
    (verification,) = verified([request(RowKind.SUPPORT, 3, WARPED, supports)], logits)
    probs = warp(logits, [WARPED] * 3).numpy()
    for i, (row, support) in enumerate(zip(verification.rows, (*supports, NO_IDS), strict=True)):
        assert isinstance(row, SupportRow)
        np.testing.assert_array_equal(row.token_ids, support)
        np.testing.assert_allclose(row.probs, probs[i, support], rtol=1e-12)
        assert row.outside_mass == pytest.approx(1.0 - probs[i, support].sum())
        assert row.outside_token_id not in support
        assert probs[i, row.outside_token_id] > 0.0


def test_a_row_without_support_draws_what_a_token_row_draws() -> None:
    """A step without a proposal has nothing to recover."""
    logits = logits_of(1)
    (support,) = verified([request(RowKind.SUPPORT, 1, WARPED)], logits)
    (token,) = verified([request(RowKind.TOKEN, 1, WARPED)], logits)
    drawn = [row.outside_token_id for row in support.rows if isinstance(row, SupportRow)]
    assert drawn == [row.token_id for row in token.rows if isinstance(row, TokenRow)]


def test_raced_recovery_samples_with_the_keys_of_the_round() -> None:
    supports = (np.array([3, 9, 41]), np.array([7]))
    logits = logits_of(3)
    (verification,) = verified([request(RowKind.SUPPORT, 3, WARPED, supports)], logits)
    probs = warp(logits, [WARPED] * 3)
    outside = probs.clone()
    for row, support in enumerate(supports):
        outside[row, support] = 0.0
    keys = torch.from_numpy(recovery_keys(WARPED.seed, 11, 3))
    assert verification.base_length == 11
    winners = sample(outside, keys).tolist()
    found = [row for row in verification.rows if isinstance(row, SupportRow)]
    assert [row.outside_token_id for row in found] == winners
    assert [row.outside_prob for row in found] == probs[range(3), winners].tolist()


def test_no_mass_outside_means_no_sample() -> None:
    logits = logits_of(1)
    sampling = SamplingParams(temperature=1.0, top_k=2)
    support = np.flatnonzero(warp(logits, [sampling])[0].numpy())
    (verification,) = verified([request(RowKind.SUPPORT, 1, sampling, (support,))], logits)
    (row,) = verification.rows
    assert isinstance(row, SupportRow)
    assert (row.outside_mass, row.outside_token_id, row.outside_prob) == (0.0, -1, 0.0)


def test_statistics_are_those_of_the_whole_row() -> None:
    logits = logits_of(1)
    sampling = SamplingParams(temperature=1.3)
    support = np.array([4, 30])
    kind = request(RowKind.SUPPORT, 1, sampling, (support,), with_statistics=True)
    (verification,) = verified([kind], logits)
    (row,) = verification.rows
    assert isinstance(row, SupportRow)
    assert row.statistics is not None
    probs = warp(logits, [sampling])[0].numpy()
    assert row.statistics.entropy == pytest.approx(-(probs * np.log(probs)).sum())
    assert row.statistics.max_prob == pytest.approx(probs.max())
    assert row.statistics.argmax_token_id == probs.argmax()
    assert row.statistics.ranks.tolist() == [(probs > probs[token_id]).sum() for token_id in support]
    np.testing.assert_array_equal(row.statistics.logits, logits[0].numpy()[support])


def test_dense_rows_are_the_logits() -> None:
    logits = logits_of(2).bfloat16()
    (verification,) = verified([request(RowKind.DENSE, 2, WARPED)], logits)
    rows = [row.logits for row in verification.rows if isinstance(row, DenseRow)]
    np.testing.assert_array_equal(rows, logits.float().numpy())


def test_rows_do_not_depend_on_the_batch() -> None:
    requests = [
        request(RowKind.TOKEN, 2, GREEDY),
        request(RowKind.SUPPORT, 3, WARPED, (np.array([1, 2]),)),
        request(RowKind.DENSE, 1, WARPED),
        request(RowKind.TOKEN, 1, SamplingParams(temperature=1.0, seed=8)),
        request(RowKind.SUPPORT, 2, SamplingParams(temperature=0.5, min_p=0.1, seed=9), with_statistics=True),
    ]
    logits = logits_of(sum(kind.step.row_count for kind in requests))
    blocks = torch.split(logits, [kind.step.row_count for kind in requests])
    together = verified(requests, logits)
    for kind, block, verification in zip(requests, blocks, together, strict=True):
        (alone,) = verified([kind], block)
        assert alone.base_length == verification.base_length
        assert [_plain(row) for row in alone.rows] == [_plain(row) for row in verification.rows]


def _plain(row: object) -> object:
    if isinstance(row, SupportRow):
        return (row.token_ids.tolist(), row.probs.tolist(), row.outside_mass, row.outside_token_id)
    return row.logits.tolist() if isinstance(row, DenseRow) else row


SAMPLED = SamplingParams(temperature=1.0, seed=3)
SUPPORTS = (np.array([3, 9]), np.array([7]))
ASKED = {
    "greedy token": request(RowKind.TOKEN, 3, GREEDY),
    "sampled token": request(RowKind.TOKEN, 3, SAMPLED),
    "truncated token": request(RowKind.TOKEN, 3, WARPED),
    "support": request(RowKind.SUPPORT, 3, SAMPLED, SUPPORTS),
    "truncated support": request(RowKind.SUPPORT, 3, WARPED, SUPPORTS, with_statistics=True),
    "greedy support": request(RowKind.SUPPORT, 3, GREEDY, SUPPORTS, with_statistics=True),
    "whole support": request(RowKind.SUPPORT, 3, SAMPLED, (np.arange(VOCABULARY_SIZE),) * 2),
    "dense": request(RowKind.DENSE, 3, SAMPLED),
}


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ASKED)
def test_non_finite_logits_affect_only_their_own_request(kind: str, number: float) -> None:
    logits = logits_of(9)
    expected = verifications([ASKED[kind]] * 3, logits)
    for row in range(3, 6):
        spoilt = logits.clone()
        spoilt[row] = number
        found = verifications([ASKED[kind]] * 3, spoilt)
        assert found[1] is None
        for index in (0, 2):
            assert repr(found[index]) == repr(expected[index])


@pytest.mark.parametrize("kind", ASKED)
def test_tokens_with_minus_infinity_are_valid(kind: str) -> None:
    logits = logits_of(3)
    logits[:, 20:] = -torch.inf
    assert None not in verifications([ASKED[kind]], logits)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ASKED)
def test_a_single_non_finite_logit_fails_the_request(kind: str, number: float) -> None:
    logits = logits_of(3)
    logits[2, 40] = number
    assert verifications([ASKED[kind]], logits) == [None]
