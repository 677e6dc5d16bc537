"""Compiled kernels agree with torch, and torch computes where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.engine.backends.cpu_native.backend import load_kernels
from tandem.engine.backends.cpu_native.layers import (
    WIDEST_SEGMENT,
    NativeAttention,
    NativeLayout,
    pack_linears,
    packed,
    unpacked,
)
from tandem.engine.backends.cpu_native.library.build import BuildError
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.core.selection import choose_backends
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError
from tests.unit.engine.conftest import MakeModel, TinyModel
from tests.unit.engine.greedy import GreedyHead, greedy, plain_greedy, running

_CPU = torch.device("cpu")
_PROMPT = [5, 17, 80, 3, 44]
_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_packed_layer_agrees_with_torch(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
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
    finally:
        torch.set_num_threads(before)


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


def test_nan_and_infinity_are_preserved(kernels: Kernels) -> None:
    weights = packed(torch.ones(3, 2, dtype=torch.bfloat16), kernels.block)
    values = torch.tensor([[float("nan"), 1], [float("inf"), 1], [-float("inf"), 1], [1, 2]])
    results = kernels.linear(values.bfloat16(), weights, None, 3).float()[:, 0]
    assert torch.equal(torch.nan_to_num(results, nan=7, posinf=8, neginf=9), torch.tensor([7.0, 8, 9, 3]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("prompt_tokens", [WIDEST_SEGMENT, WIDEST_SEGMENT + 1])
async def test_a_prompt_is_read_alike_by_the_kernel_and_by_torch(
    family: str, prompt_tokens: int, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    widths: list[int] = []
    right = NativeLayout.__init__

    def noted(self: NativeLayout, segments: SequenceOf[Segment], shapes: NativeAttention) -> None:
        widths.append(max(segment.token_count for segment in segments))
        right(self, segments, shapes)

    monkeypatch.setattr(NativeLayout, "__init__", noted)
    prompt = [3 + 7 * step % 90 for step in range(prompt_tokens)]
    async with running(model.backends, GreedyHead()) as engine:
        assert await greedy(engine, prompt, 8) == plain_greedy(model.reference, prompt, 8)
    assert (prompt_tokens in widths) is (prompt_tokens <= WIDEST_SEGMENT)
    assert 1 in widths


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
async def test_without_a_compiler_torch_computes(
    family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with caplog.at_level(logging.WARNING):
        backends = choose_backends(load_model(model.folder, dtype="float32"))
    assert backends.native is None
    assert [record.__dict__["reason"] for record in caplog.records if "kernels" in record.message] == [
        "no C++ compiler: /nonexistent/c++ not found"
    ]
    async with running(backends, GreedyHead()) as engine:
        assert await greedy(engine, _PROMPT, 8) == plain_greedy(model.reference, _PROMPT, 8)


def test_required_but_unavailable_kernels_are_an_error(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    model = load_model(llama.folder, dtype="float32")
    with pytest.raises(
        ConfigurationError, match=r"compile is on, .*: no C\+\+ compiler: /nonexistent/c\+\+ not"
    ):
        choose_backends(model, compile_mode="on", compile_cache=tmp_path)
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
