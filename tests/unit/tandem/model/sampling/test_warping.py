"""Warping agrees with the logits processors of Hugging Face transformers, and numpy with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.model.sampling.warping import warp
from tandem.model.types import Float32Array, FloatArray, SamplingParams

TOLERANCE = 1e-14

NO_TOKENS: Any = torch.zeros(1, 1, dtype=torch.long)
"""The processors require the previous tokens but ignore them."""


def _reference(logits: Float32Array, params: SamplingParams) -> FloatArray:
    """The processors of transformers in vLLM's order, applied to one row in float64 as ours; their sort made stable,
    which transformers does not promise."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    with pytest.MonkeyPatch.context() as patch:
        sort = torch.sort
        patch.setattr(
            torch, "sort", lambda scores, descending: sort(scores, descending=descending, stable=True)
        )
        warped = processors(NO_TOKENS, scores)
    probs: FloatArray = warped.softmax(dim=-1)[0].numpy()
    return probs


def _assert_as_reference(logits: Float32Array, sampling: list[SamplingParams]) -> None:
    expected = [_reference(row, params) for row, params in zip(logits, sampling, strict=True)]
    by_numpy = warp(logits, sampling)
    by_torch = warp(torch.tensor(logits), sampling)
    assert by_numpy.dtype == np.float64
    assert by_torch.dtype == torch.float64
    np.testing.assert_allclose(by_numpy, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(by_torch.numpy(), expected, rtol=0, atol=TOLERANCE)
    # Closeness is not enough where a token is left out: both must leave out the same.
    np.testing.assert_array_equal(by_numpy > 0, np.array(expected) > 0)
    np.testing.assert_array_equal(by_torch.numpy() > 0, np.array(expected) > 0)


CASES = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=20),
    "top-p": SamplingParams(temperature=1.3, top_p=0.9),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "top-k and top-p": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "all": SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.1),
    "top-k of one": SamplingParams(temperature=1.0, top_k=1),
    "top-k of more than there are": SamplingParams(temperature=1.0, top_k=10_000),
    "top-p of nothing": SamplingParams(temperature=1.0, top_p=0.0),
    "min-p of everything": SamplingParams(temperature=1.0, min_p=1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_warping_agrees_with_transformers(case: str) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 500)).astype(np.float32)
    _assert_as_reference(logits, [CASES[case]] * 4)


TIED = np.array([[2.0, 1.0, 2.0, 2.0, 0.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), [0, 2, 3]),
        (SamplingParams(top_k=3), [0, 2, 3]),
        (SamplingParams(top_k=4), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.0), [3]),
        (SamplingParams(top_p=0.5), [2, 3]),
        (SamplingParams(top_k=1, top_p=0.4), [2, 3]),
        (SamplingParams(min_p=1.0), [0, 2, 3]),
        (SamplingParams(temperature=0.0), [0]),
    ],
)
def test_ties_by_hand(params: SamplingParams, kept: list[int]) -> None:
    """Top-k and min-p keep all that tie with the last; top-p drops the lowest ids of those that tie first."""
    for logits in (TIED, torch.tensor(TIED)):
        probs = np.asarray(warp(logits, [params])[0])
        assert np.flatnonzero(probs > 0).tolist() == kept
        assert probs.sum() == pytest.approx(1.0, abs=TOLERANCE)


@settings(max_examples=200, derandomize=True)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda value: value / 4), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.0, 0.1, 0.37, 0.8, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
def test_any_parameters_as_transformers(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p)
    _assert_as_reference(np.array([logits], dtype=np.float32), [params])


def test_greedy_rows_beside_sampled_ones() -> None:
    logits = np.random.default_rng(4).normal(0, 2, (3, 30)).astype(np.float32)
    sampling = [SamplingParams(temperature=0.0), CASES["all"], SamplingParams(temperature=0.0)]
    for given_logits in (logits, torch.tensor(logits)):
        probs = np.asarray(warp(given_logits, sampling))
        np.testing.assert_array_equal(probs[[0, 2]].argmax(axis=1), logits[[0, 2]].argmax(axis=1))
        assert np.all(probs[[0, 2]].max(axis=1) == 1.0)
        np.testing.assert_allclose(probs[1], _reference(logits[1], CASES["all"]), rtol=0, atol=TOLERANCE)


def test_tokens_with_minus_infinity_stay_impossible() -> None:
    logits = np.array([[0.0, -np.inf, 1.0, -np.inf]], dtype=np.float32)
    for params in CASES.values():
        for given_logits in (logits, torch.tensor(logits)):
            probs = np.asarray(warp(given_logits, [params]))[0]
            assert probs[[1, 3]].tolist() == [0.0, 0.0]
            assert probs.sum() == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_large_logits_do_not_overflow(offset: float) -> None:
    logits = np.array([[offset, offset + 1.0]], dtype=np.float32)
    expected = 1 / (1 + np.exp(-1 / 0.01))
    assert warp(logits, [SamplingParams(temperature=0.01)])[0, 1] == pytest.approx(expected)


def test_logits_are_not_changed() -> None:
    logits = np.random.default_rng(6).normal(0, 1, (1, 50)).astype(np.float32)
    before = logits.copy()
    warp(logits, [CASES["all"]])
    np.testing.assert_array_equal(logits, before)
