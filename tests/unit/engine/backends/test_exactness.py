"""The CPU kernels' bfloat16 is at least as near to float32 as torch's own, on the bundled target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.studies.exactness import absolute_errors, log_probs, prompts, reference, ways
from tandem.engine.backends.cpu_native.layers import PackedLinear
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError
from tests.paths import DEMO_TARGET
from tests.unit.engine.conftest import TinyModel

PROMPTS = 8


def test_a_tokens_log_probability_is_as_exact_as_torchs() -> None:
    """`make exactness` measures the same over 200 prompts, and over a second model."""
    texts = prompts(DEMO_TARGET, PROMPTS)
    exact = log_probs(reference(DEMO_TARGET), texts)
    errors: dict[str, Any] = {}
    try:
        for way, backends in ways(DEMO_TARGET):
            errors[way] = np.concatenate(absolute_errors(_unplanned(backends), texts, exact))
    except ConfigurationError as error:
        pytest.skip(str(error))
    assert 0.001 < errors["torch"].mean() < 0.02
    assert errors["kernels"].mean() <= 1.05 * errors["torch"].mean()
    assert errors["kernels"].max() <= 1.05 * errors["torch"].max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_and_the_residual_stream_are_not_rounded(
    family: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    module: Any = _with_kernels(tiny_model(family).folder).model.module
    head = module.get_output_embeddings()
    values = torch.randn(3, head.in_features).bfloat16()
    logits = head(values)
    assert logits.dtype == torch.float32
    expected = nn.functional.linear(values.double(), head.weight.double())
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)
    wide = {
        name.rpartition(".")[2]
        for name, layer in module.named_modules()
        if isinstance(layer, PackedLinear)
        and layer(torch.randn(1, layer.in_features)).dtype == torch.float32
        and layer is not head
    }
    assert wide == ({"o_proj", "down_proj"} if family == "llama" else set())


def test_a_model_that_cannot_have_a_wide_residual_stream_keeps_its_own(
    tiny_model: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    """Experts are multiplied by torch, which takes equal types only."""
    with caplog.at_level(logging.INFO):
        backends = _with_kernels(tiny_model("mixtral").folder)
    assert "the residual stream stays bfloat16" in caplog.text
    layers = [layer for layer in backends.model.module.modules() if isinstance(layer, PackedLinear)]
    assert [layer._output_dtype for layer in layers].count(torch.float32) == 1


def _with_kernels(folder: Path) -> Backends:
    backends = choose_backends(load_model(folder, dtype="bfloat16"))
    if backends.native is None:
        pytest.skip("there is no C++ compiler")
    return backends


def _unplanned(backends: Backends) -> Backends:
    """Plans replay the modules' steps; compiling them would take most of the test's time."""
    return (
        backends
        if backends.native is None
        else replace(backends, native=replace(backends.native, trace=None))
    )
