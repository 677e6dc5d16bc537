"""Elementwise operations of the kernels give torch's results bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.plans import UnknownOperationError, kernel_calls

aten: Any = torch.ops.aten

_FLOAT, _NARROW = torch.float32, torch.bfloat16
_DTYPES = [_FLOAT, _NARROW]
_UNARY = [aten.neg.default, aten.silu.default, aten.rsqrt.default]
_BINARY = [aten.add.Tensor, aten.mul.Tensor]


def _numbers(*shape: int, dtype: torch.dtype = _FLOAT, seed: int = 1) -> Tensor:
    return (3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _all_narrow() -> Tensor:
    """Every bfloat16 there is, infinities and NaNs included."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(_NARROW)


def _agrees(kernels: Kernels, target: Any, *arguments: Any, **named: Any) -> bool:
    expected = target(*arguments, **named)
    output = torch.full_like(expected, 7.0)
    kernels.run(*kernel_calls(target, arguments, named, output))
    return torch.equal(output.isnan(), expected.isnan()) and torch.equal(
        output.nan_to_num(), expected.nan_to_num()
    )


_ODD = torch.tensor(
    [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-42, -1e-42, 88.8, -88.8, -103.9, -104.1]
)


@pytest.mark.parametrize("target", [*_UNARY, aten._to_copy.default], ids=str)
def test_one_tensor(kernels: Kernels, target: Any) -> None:
    """Every bfloat16, and floats of any size."""
    sizes = [spread * _numbers(100_003) for spread in (1.0, 30.0, 1e-30, 1e30)]
    for values in (_all_narrow(), _ODD, _ODD.repeat(32), *sizes):
        assert _agrees(kernels, target, values)


@pytest.mark.parametrize("target", _BINARY, ids=str)
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *product(_DTYPES, (1.0, 0.375, -2.5, 3)),
        (_FLOAT, 1e-6),
        (_FLOAT, -0.3),
    ],  # the last two have many digits
)
def test_a_tensor_and_a_number(kernels: Kernels, target: Any, dtype: torch.dtype, number: float) -> None:
    assert _agrees(kernels, target, _numbers(3, 37, dtype=dtype), number)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    width=st.integers(2, 70),
    turned=st.permutations([0, 1, 2]),
    start=st.integers(0, 2),
    data=st.data(),
)
def test_every_layout_of_rows(
    kernels: Kernels, shape: list[int], width: int, turned: list[int], start: int, data: st.DataObject
) -> None:
    """Heads that were turned, halves that were cut out and single rows that meet all others."""
    whole = _numbers(*shape, width + 3)
    values = whole.permute(*turned, 3)[..., start : start + width]
    repeated = [size if data.draw(st.booleans()) else 1 for size in values.shape]
    other = _numbers(*repeated, seed=5)
    first, second = (data.draw(st.sampled_from(_DTYPES)) for _ in range(2))
    for target in _BINARY:
        assert _agrees(kernels, target, values.to(first), other.to(second))
        assert _agrees(kernels, target, other.to(first), values.to(second))
    assert _agrees(kernels, aten.neg.default, values)
    assert _agrees(kernels, aten.cat.default, [values, whole.permute(*turned, 3)], -1)
    assert _agrees(kernels, aten.cat.default, [values, values.clone()], 1)
    assert _agrees(kernels, aten._to_copy.default, values, dtype=_NARROW)


@pytest.mark.parametrize("width", [8, 31, 33, 100, 320, 513, 2048, 4096, 16_384, 70_001])
def test_means_are_summed_in_torchs_order(kernels: Kernels, width: int) -> None:
    """On other processors than x86 torch sums in another order; a plan keeps torch's own operation there."""
    if torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}:
        pytest.skip("torch sums in another order here")
    assert _agrees(kernels, aten.mean.dim, _numbers(1, 3, width), [-1], True)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_an_embedding_lookup(kernels: Kernels, dtype: torch.dtype) -> None:
    assert _agrees(
        kernels, aten.embedding.default, _numbers(40, 24, dtype=dtype), torch.tensor([[3, 39, 0, 3]]), 0
    )


@pytest.mark.parametrize("token_id", [-1, 40, 1 << 40])
def test_an_id_outside_the_table_is_refused(kernels: Kernels, token_id: int) -> None:
    output = torch.zeros(1, 2, 24)
    calls = kernel_calls(
        aten.embedding.default, (_numbers(40, 24), torch.tensor([[3, token_id]])), {}, output
    )
    with pytest.raises(IndexError, match="not in the table"):
        kernels.run(*calls)
    assert not output.any()


def test_positions_become_floats(kernels: Kernels) -> None:
    assert _agrees(
        kernels, aten._to_copy.default, torch.arange(0, 1 << 25, 999_983)[None, :, None], dtype=_FLOAT
    )


@pytest.mark.parametrize(
    ("target", "arguments", "named"),
    [
        (aten.cos.default, (_numbers(9),), {}),
        (aten.add.Tensor, (_numbers(9), _numbers(9)), {"alpha": 2}),
        (aten.add.Tensor, (torch.arange(9), torch.arange(9)), {}),
        (aten.add.Tensor, (_numbers(9, dtype=_NARROW), torch.tensor(1.2345)), {}),
        (aten.add.Tensor, (_numbers(9, dtype=_NARROW), 0.3), {}),
        (aten.pow.Tensor_Scalar, (_numbers(9), 3), {}),
        (aten.mean.dim, (_numbers(9, 9), [0], True), {}),
        (aten.mean.dim, (_numbers(9, 7), [-1], True), {}),
        (aten.mean.dim, (_numbers(9, 9, dtype=_NARROW), [-1], True), {}),
        (aten.neg.default, (_numbers(9, 9, dtype=torch.float64),), {}),
        (aten.clone.default, (_numbers(9, 9).T,), {"memory_format": torch.contiguous_format}),
        (aten.neg.default, (_numbers(2, 2, 2, 2, 2, 2)[:, :1].expand(2, 2, 2, 2, 2, 2)[..., ::2],), {}),
        (aten.embedding.default, (_numbers(9, 9).T, torch.tensor([3])), {}),
    ],
    ids=str,
)
def test_unsupported_operations_are_left_to_torch(target: Any, arguments: Any, named: Any) -> None:
    with pytest.raises(UnknownOperationError):
        kernel_calls(target, arguments, named, target(*arguments, **named))
