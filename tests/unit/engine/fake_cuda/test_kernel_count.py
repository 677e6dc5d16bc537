"""How many kernels a layer of a captured step launches."""

from __future__ import annotations

import pytest

from tandem.engine.backends.fused.fuse import is_fusible, replace_layers
from tests.unit.engine.fake_cuda.models import make_model
from tests.unit.engine.fake_cuda.steps import captured_step

PLAIN_KERNELS = {"Llama-3.1-8B": 41, "Mistral-7B-v0.3": 41, "Qwen2.5-7B": 41, "Qwen3-32B": 57}
"""Of transformers' own modules."""


FUSED_KERNELS = {"Llama-3.1-8B": 17, "Mistral-7B-v0.3": 17, "Qwen2.5-7B": 17, "Qwen3-32B": 20}
"""Of the layers that replace them."""


def kernels_per_layer(name: str, *, fused: bool) -> int:
    """The difference that one layer more makes."""
    counts = []
    for layers in (1, 2):
        model = make_model(name, layers)
        if fused:
            assert is_fusible(model.module)
            replace_layers(model.module, [])
        counts.append(captured_step(model)[1].kernel_count)
    return counts[1] - counts[0]


@pytest.mark.parametrize("name", PLAIN_KERNELS)
def test_kernels_of_transformers_modules(fake_cuda: None, name: str) -> None:
    assert kernels_per_layer(name, fused=False) == PLAIN_KERNELS[name]


@pytest.mark.parametrize("name", FUSED_KERNELS)
def test_kernels_of_fused_layers(fake_cuda: None, name: str) -> None:
    assert kernels_per_layer(name, fused=True) == FUSED_KERNELS[name] <= 28
