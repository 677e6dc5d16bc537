"""Compiled kernels agree with torch, also where they sample, and torch computes where they cannot."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.engine.backends.cpu_native.backend import KernelSampler, load_kernels
from tandem.engine.backends.cpu_native.layers import WIDEST_SEGMENT, pack_linears, packed, unpacked
from tandem.engine.backends.cpu_native.library.build import BuildError
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.plans import UnknownOperationError, kernel_calls
from tandem.engine.core.selection import choose_backends
from tandem.engine.models.loading import load_model
from tandem.engine.rows import TORCH_SAMPLER, Sampler
from tandem.errors import ConfigurationError
from tandem.model.sampling.noise import sample
from tandem.model.sampling.warping import warp
from tandem.model.types import Delta, SamplingParams
from tests.unit.engine.conftest import MakeModel, TinyModel, torch_threads
from tests.unit.engine.greedy import GreedyHead, RowsHead, greedy, plain_greedy, rows, running

_CPU = torch.device("cpu")
_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_packed_layer_agrees_with_torch(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    with torch_threads(threads):
        for outputs, inputs, bias in [
            (1, 1, True),
            (31, 7, False),
            (33, 64, True),
            (200, 129, False),
            (1600, 640, True),
        ]:
            layer = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
            model = nn.Sequential(layer)
            weight = layer.weight.detach().clone()
            for rows in (1, 2, 3, 4, 7, 11, 12, 13, 24, 25, 40):
                values = torch.randn(1, rows, inputs).to(dtype)
                expected = nn.functional.linear(values, weight, layer.bias)
                if type(layer) is nn.Linear:
                    assert pack_linears(model, kernels) == 1
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                assert torch.allclose(model(values), expected, atol=tolerance, rtol=tolerance), (
                    outputs,
                    rows,
                )
            assert torch.equal(layer.weight, weight)


def test_float32_weights_that_are_exact_in_bfloat16_are_stored_so(kernels: Kernels) -> None:
    weight = torch.randn(50, 20)
    assert packed(weight, kernels.block).dtype == torch.float32
    short = packed(weight.bfloat16().float(), kernels.block)
    assert short.dtype == torch.bfloat16
    assert torch.equal(unpacked(short, 50, 20).float(), weight.bfloat16().float())
    values = torch.randn(5, 20)
    expected = values.double() @ weight.bfloat16().double().T
    assert torch.allclose(kernels.linear(values, short, None, 50).double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("inputs", [300, 320])
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, inputs: int, dtype: torch.dtype) -> None:
    weights = packed(torch.randn(70, inputs).to(dtype), kernels.block)
    values = torch.randn(40, inputs).to(dtype)
    together = kernels.linear(values, weights, None, 70)
    for first in (0, 3, 20):
        for count in (1, 2, 5, 13, 17):
            rows = slice(first, first + count)
            assert torch.equal(kernels.linear(values[rows], weights, None, 70), together[rows])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
async def test_a_token_has_the_same_bits_alone_as_in_any_proposal(family: str, tiny_model: MakeModel) -> None:
    text = [3 + 7 * step % 90 for step in range(72)]  # more than a page
    found = []
    async with running(tiny_model(family).backends, RowsHead(), prefix_reuse=False) as engine:
        for width in range(1, 10):
            sequence = await engine.open(len(text))
            parts = [Delta(at, text[at : at + width]) for at in range(0, len(text), width)]
            found.append(
                torch.cat([await rows(engine, sequence, part, len(part.token_ids)) for part in parts])
            )
            engine.release(sequence)
    assert [width for width, logits in enumerate(found, 1) if not torch.equal(logits, found[0])] == []


def test_nan_and_infinity_are_preserved(kernels: Kernels) -> None:
    weights = packed(torch.ones(3, 2, dtype=torch.bfloat16), kernels.block)
    values = torch.tensor([[float("nan"), 1], [float("inf"), 1], [-float("inf"), 1], [1, 2]])
    results = kernels.linear(values.bfloat16(), weights, None, 3).float()[:, 0]
    assert torch.equal(torch.nan_to_num(results, nan=7, posinf=8, neginf=9), torch.tensor([7.0, 8, 9, 3]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("prompt_tokens", [WIDEST_SEGMENT, WIDEST_SEGMENT + 1])
async def test_a_prompt_is_read_alike_by_the_kernel_and_by_torch(
    family: str, prompt_tokens: int, tiny_model: MakeModel
) -> None:
    """A segment of more tokens than the kernel takes is read by torch."""
    model = tiny_model(family)
    prompt = [3 + 7 * step % 90 for step in range(prompt_tokens)]
    async with running(model.backends, GreedyHead()) as engine:
        assert await greedy(engine, prompt, 8) == plain_greedy(model.reference, prompt, 8)


def test_without_a_compiler_torch_computes_unless_kernels_are_demanded(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    model = load_model(llama.folder, dtype="float32")
    reason = "no C++ compiler: /nonexistent/c++ not found"
    with caplog.at_level(logging.WARNING):
        assert choose_backends(model).native is None
    assert [vars(record)["reason"] for record in caplog.records if "kernels" in record.message] == [reason]
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        choose_backends(model, compile_mode="on")
    with pytest.raises(ConfigurationError, match=r"there are none for torch\.float16 on cpu"):
        choose_backends(load_model(llama.folder, dtype="float16"), compile_mode="on")
    assert choose_backends(model, compile_mode="off").native is None


def test_kernels_that_sample_otherwise_than_torch_are_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Kernels.sample
    monkeypatch.setattr(Kernels, "sample", lambda *arguments: right(*arguments) + 1)
    with pytest.raises(BuildError, match="do not sample as torch does"):
        load_kernels(_CPU, torch.float32)


aten: Any = torch.ops.aten

_FLOAT = torch.float32
_NARROW = torch.bfloat16
_UNARY = [aten.neg.default, aten.silu.default, aten.rsqrt.default]


def _numbers(*shape: int, dtype: torch.dtype = _FLOAT, seed: int = 1) -> Tensor:
    return (3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _all_narrow() -> Tensor:
    """Every bfloat16 there is, infinities and NaNs included."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(_NARROW)


def _agrees(kernels: Kernels, target: Any, *arguments: Any, **named: Any) -> bool:
    expected = target(*arguments, **named)
    output = torch.full_like(expected, 7.0)
    kernels.run(*kernel_calls(target, arguments, named, output))
    # Of the last few numbers torch takes another exponential.
    rounding = 2.0 * torch.finfo(output.dtype).eps if target is aten.silu.default else 0.0
    return torch.allclose(output, expected, rtol=rounding, atol=0.0, equal_nan=True)


_ODD = torch.tensor(
    [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-42, -1e-42, 88.8, -88.8, -103.9, -104.1]
)


@pytest.mark.parametrize("target", [*_UNARY, aten._to_copy.default], ids=str)
def test_one_tensor(kernels: Kernels, target: Any) -> None:
    """Every bfloat16, and floats of any size."""
    sizes = [spread * _numbers(100_003) for spread in (1.0, 30.0, 1e-30, 1e30)]
    for values in (_all_narrow(), _ODD, _ODD.repeat(32), *sizes):
        assert _agrees(kernels, target, values)


def test_a_number_has_the_same_bits_wherever_it_stands(kernels: Kernels) -> None:
    values = torch.full((101,), 1.7)
    output = torch.empty_like(values)
    for value in torch.linspace(-9.0, 9.0, 500):
        kernels.run(*kernel_calls(aten.silu.default, (values.fill_(value),), {}, output))
        assert (output == output[0]).all()


@pytest.mark.parametrize("width", [8, 31, 33, 100, 320, 513, 2048, 4096, 16_384, 70_001])
def test_means_are_summed_in_torchs_order(kernels: Kernels, width: int) -> None:
    """On other processors than x86 torch sums in another order; a plan keeps torch's own operation there."""
    if torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}:
        pytest.skip("torch sums in another order here")
    assert _agrees(kernels, aten.mean.dim, _numbers(1, 3, width), [-1], True)


@pytest.mark.parametrize("token_id", [-1, 40, 1 << 40])
def test_an_id_outside_the_table_is_refused(kernels: Kernels, token_id: int) -> None:
    output = torch.zeros(1, 2, 24)
    calls = kernel_calls(
        aten.embedding.default, (_numbers(40, 24), torch.tensor([[3, token_id]])), {}, output
    )
    with pytest.raises(IndexError, match="not in the table"):
        kernels.run(*calls)
    assert not output.any()


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
def test_truncating_parameters_are_left_to_torch(sampler: Sampler, sampling: SamplingParams) -> None:
    logits = logits_of(3, 300, torch.float32)
    mixed = [sampling, SamplingParams(0.9), SamplingParams(0.5)]
    assert torch.equal(sampler.probabilities(logits, mixed), warp(logits, mixed))
