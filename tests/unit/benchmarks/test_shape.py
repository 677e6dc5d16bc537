"""How large a shaped pair is."""

from __future__ import annotations

import pytest

from benchmarks.models.shape import parse_shaped
from tandem.errors import ConfigurationError


def test_eight_billion_parameters_are_llama_31_itself() -> None:
    shape = parse_shaped("shaped:8B:2:0.8").shape()

    assert (shape.width, shape.layers, shape.mlp_width, shape.vocabulary_size) == (4096, 32, 14336, 128_256)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.is_tied) == (32, 8, 128, False)
    assert shape.parameters == 8_030_261_248, "what Hugging Face counts for Llama-3.1-8B"


@pytest.mark.parametrize("asked", ["1M", "5M", "25M", "200M", "1B", "3B", "70B"])
def test_a_shape_has_about_as_many_parameters_as_asked(asked: str) -> None:
    pair = parse_shaped(f"shaped:{asked}:1:0.5")
    shape = pair.shape()

    assert shape.parameters == pytest.approx(pair.parameters, rel=0.1)
    assert shape.heads * shape.head_dim == shape.width
    assert shape.heads == 4 * shape.kv_heads
    assert shape.layers >= 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("shaped:200M:1", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:lots:1:0.8", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:200M:1.5:0.8", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:200M:1:1.0", "the agreement must be between 0 and 1"),
        ("shaped:200M:1:0", "the agreement must be between 0 and 1"),
        ("shaped:10K:1:0.5", "the target must have from 500K to 100B parameters"),
    ],
)
def test_what_cannot_be_made_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--pair is '{text}'.*{complaint}"):
        parse_shaped(text)
