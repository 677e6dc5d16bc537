"""Sampling with kernels agrees with sampling with torch."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.backends.cpu_native.backend import KernelSampler
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.rows import TORCH_SAMPLER, Sampler
from tandem.sampling.noise import sample
from tandem.sampling.warping import warp
from tandem.types import SamplingParams

WIDTHS = (1, 5, 16, 17, 64, 2048, 5003)


@pytest.fixture(scope="module")
def sampler(kernels: Kernels) -> Sampler:
    return KernelSampler(kernels)


def logits_of(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + width)
    logits = torch.randn(rows, width, generator=generator) * 4
    if width > 4:
        logits[:, 2] = -torch.inf
    return logits.to(dtype)


def keys_of(rows: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_probabilities_are_those_of_torch_but_for_the_last_places(
    sampler: Sampler, width: int, dtype: torch.dtype
) -> None:
    logits = logits_of(20, width, dtype)
    sampling = [SamplingParams(0.3 + 0.1 * (row % 9)) for row in range(20)]
    probs = sampler.probabilities(logits, sampling)
    torch.testing.assert_close(probs, warp(logits, sampling), rtol=1e-12, atol=1e-300)
    if width > 4:
        assert not probs[:, 2].any(), "what is impossible stays impossible"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_is_the_first_of_equal_maxima(sampler: Sampler, width: int, dtype: torch.dtype) -> None:
    logits = logits_of(20, width, dtype)
    logits[10:] = logits[10:].round()  # many are equal
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sampler.argmax(logits).tolist() == TORCH_SAMPLER.argmax(logits).tolist() == expected
    assert sampler.argmax(torch.full((2, width), -torch.inf, dtype=dtype)).tolist() == [-1, -1]
    assert sampler.argmax(torch.full((2, width), torch.nan, dtype=dtype)).tolist() == [-1, -1]
    poisoned = logits.index_fill(1, torch.tensor([0]), torch.nan)
    assert TORCH_SAMPLER.argmax(poisoned).tolist() == [-1] * len(logits)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_same_columns_are_sampled(sampler: Sampler, width: int) -> None:
    rows = 40
    probs = warp(logits_of(rows, width, torch.float32), [SamplingParams()] * rows)
    keys = keys_of(rows)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(2 * width, generator=generator)[:width] for _ in range(rows)])
    assert torch.equal(sampler.sample(probs, keys), sample(probs, keys))
    assert torch.equal(sampler.sample(probs, keys, ids), sample(probs, keys, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_topk_is_sorted_and_distinct(sampler: Sampler, width: int, dtype: torch.dtype, share: float) -> None:
    logits = logits_of(5, width, dtype)
    count = max(1, round(share * width))
    values, columns = sampler.topk(logits, count)
    assert torch.equal(values, logits.float().topk(count).values)
    assert torch.equal(logits.float().gather(1, columns), values)
    assert all(len(set(row)) == count for row in columns.tolist())


@pytest.mark.parametrize(("width", "count"), [(300, 100), (2000, 100), (2000, 20)])
def test_of_equal_logits_the_lowest_columns_come_first(sampler: Sampler, width: int, count: int) -> None:
    logits = logits_of(3, width, torch.float32).round()
    _, columns = sampler.topk(logits, count)
    assert torch.equal(columns, logits.argsort(dim=-1, descending=True, stable=True)[:, :count])


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(0.0), SamplingParams(0.7, top_k=5), SamplingParams(1.0, top_p=0.9), SamplingParams(1.0, min_p=0.1)],
    ids=["greedy", "top_k", "top_p", "min_p"],
)  # fmt: skip
def test_unsupported_operations_are_left_to_torch(sampler: Sampler, sampling: SamplingParams) -> None:
    logits = logits_of(3, 300, torch.float32)
    mixed = [sampling, SamplingParams(0.9), SamplingParams(0.5)]
    assert torch.equal(sampler.probabilities(logits, mixed), warp(logits, mixed))
