"""Replacements of torch's computation are judged by torch's own rounding errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tandem.engine.backends.cpu_native import layers
from tandem.engine.backends.cpu_native.layers import NativeLayout, PackedLinear
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.eager import eager_backend
from tandem.engine.backends.trial import DistrustedError, Reference, computing_in, trusted
from tandem.engine.core.selection import choose_backends
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.models.loading import load_model
from tandem.engine.steps import Packing
from tests.unit.engine.conftest import TinyModel


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "bloom"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_passes_its_own_trial(family: str, dtype: str, tiny_model: Callable[[str], TinyModel]) -> None:
    reference = Reference(load_model(tiny_model(family).folder, dtype=dtype))
    assert reference.error_of(eager_backend) == pytest.approx(1.0, abs=1e-3)


class Wrong:
    """Gives torch's own logits, but in each sequence with its error times a factor."""

    warm_up_steps = ()

    def __init__(self, reference: Reference, own: torch.Tensor, factors: Sequence[float]) -> None:
        counts = [count for _, count in reference._lengths]
        parts, exact = torch.split(own, counts), torch.split(reference._exact, counts)
        pairs = zip(parts, exact, factors, strict=True)
        self._logits = torch.cat([right + factor * (part - right) for part, right, factor in pairs])

    def run(self, segments: object, rows: object) -> torch.Tensor:
        return self._logits


@pytest.mark.parametrize(
    ("factors", "is_trusted"),
    [
        ((1.0, 1.0, 1.0, 1.0), True),
        ((0.3, 0.4, 2.1, 0.4), True),  # SmolLM2 with a residual stream of float32
        ((0.3, 0.4, 5.0, 0.4), False),
        ((0.0, 0.0, 5.0, 0.0), False),
        ((1.6, 1.6, 1.6, 1.6), False),
        ((1.0, float("nan"), 1.0, 1.0), False),
    ],
)
def test_no_single_sequence_decides_a_trial_unless_it_is_far_off(
    factors: Sequence[float], is_trusted: bool, llama: TinyModel
) -> None:
    reference = Reference(load_model(llama.folder, dtype="bfloat16"))
    own = reference._logits(torch.bfloat16, eager_backend)
    error = reference.error_of(lambda *_: Wrong(reference, own, factors))  # type: ignore[arg-type]
    assert (error <= reference.limit) == is_trusted


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "bloom"])
def test_kernels_of_bfloat16_are_as_exact_as_torch(
    family: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    backends = choose_backends(load_model(tiny_model(family).folder, dtype="bfloat16"))
    if backends.native is None:
        pytest.skip("there is no C++ compiler")
    native = backends.native

    def served(model: Any, arena: Any) -> Any:
        return native.backend(arena) or eager_backend(model, arena)

    assert native.reference.error_of(served) < 1.25, "in torch's own errors; 0.8 to 1.1 were measured"


@pytest.mark.parametrize("factor", [1.05, float("nan")])
@pytest.mark.parametrize(("owner", "method"), [(Kernels, "linear"), (NativeLayout, "attend")])
def test_slightly_wrong_kernels_are_not_used(
    owner: type,
    method: str,
    factor: float,
    llama: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half a tenth is less than a loose tolerance lets pass, and it is in every layer alike."""
    model = load_model(llama.folder, dtype="bfloat16")
    weights = [layer.weight.clone() for layer in model.module.modules() if isinstance(layer, nn.Linear)]
    right = getattr(owner, method)

    def wrong(self: Any, *arguments: Any, **named: Any) -> Any:
        return right(self, *arguments, **named) * factor

    monkeypatch.setattr(owner, method, wrong)
    with caplog.at_level(logging.WARNING):
        assert choose_backends(model).native is None
    if "no C++ compiler" not in caplog.text:
        assert "times torch's own" in vars(caplog.records[-1])["reason"]
    own = [layer for layer in model.module.modules() if isinstance(layer, nn.Linear)]
    assert not any(isinstance(layer, PackedLinear) for layer in own)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(own, weights, strict=True))


def test_kernels_that_read_other_pages_than_the_tables_are_not_used(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive pages instead, each sequence's from its own first one on."""
    right = layers.places
    kept: list[PageTable] = []

    def wrong(packing: Packing, group: int) -> list[int]:
        numbers = right(packing, group)
        for index, segment in enumerate(packing.segments):
            table = segment.sequence.table
            kept.append(PageTable(table.page_tokens, table.capacity, range(table[0], table[0] + len(table))))
            numbers[1 + 3 * index] = kept[-1].address
        return numbers

    monkeypatch.setattr(layers, "places", wrong)
    assert choose_backends(load_model(llama.folder, dtype="float32")).native is None


def test_a_failing_replacement_is_rejected_with_a_reason() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\nand more")

    with pytest.raises(DistrustedError, match=r"^RuntimeError: no such kernel$"):
        trusted(fail, lambda _: 0.0, 1.0)
    with pytest.raises(DistrustedError, match=r"its error is 2 times torch's own, which must be at most 1"):
        trusted(lambda: None, lambda _: 2.0, 1.0)


def test_wide_arithmetic_leaves_the_weights_as_they_are() -> None:
    layer = nn.Linear(64, 32).bfloat16()
    values = torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        expected = nn.functional.linear(values.float(), layer.weight.float(), layer.bias.float())
        with computing_in(torch.float32):
            results = layer(values)
    assert results.dtype == torch.float32
    assert torch.equal(results, expected)
    assert layer.weight.dtype == torch.bfloat16
