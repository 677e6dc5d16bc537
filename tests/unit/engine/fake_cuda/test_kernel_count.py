"""How many kernels a layer of a captured step launches."""

from __future__ import annotations

import pytest

from tests.unit.engine.fake_cuda.models import make_model
from tests.unit.engine.fake_cuda.steps import captured_step

PLAIN_KERNELS = {"Llama-3.1-8B": 41, "Mistral-7B-v0.3": 41, "Qwen2.5-7B": 41, "Qwen3-32B": 57}
"""Of transformers' own modules."""


def kernels_per_layer(name: str) -> int:
    """The difference that one layer more makes."""
    one, two = (captured_step(make_model(name, layers))[1].kernel_count for layers in (1, 2))
    return two - one


@pytest.mark.parametrize("name", PLAIN_KERNELS)
def test_kernels_of_transformers_modules(fake_cuda: None, name: str) -> None:
    assert kernels_per_layer(name) == PLAIN_KERNELS[name]
