"""Steps of 32 sequences of 8,192 tokens at real widths: devices, synchronizations, temporaries and attention calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.proposers.captured_proposals import _Loop
from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.models.loading import LoadedModel
from tests.unit.engine.fake_cuda.device import Recorder
from tests.unit.engine.fake_cuda.models import CONFIGS, LAYERS
from tests.unit.engine.fake_cuda.steps import (
    SEQUENCES,
    WIDTH,
    RecordingCapture,
    captured_step,
    eager_step,
    graph_context,
    segments,
)

VARLEN = "torch_attn::_varlen_attn"
MIX = [700, 300, *[WIDTH] * 15, *[1] * 15]
"""Parts of two prompts, verifications and decodes."""
COUNT, TOP_K = 4, 64
"""Of a proposal."""

PLAIN = {"Gemma-2-9B", "GPT-OSS-20B"}
"""Plain torch attends, since scores are capped or have sinks."""
MAX_PART_BYTES = 256 << 20
"""Of keys, or whatever else it makes of some pages."""


def _check(model: LoadedModel, recorder: Recorder, tokens: int, rows: int, steps: int = 1) -> None:
    """One attention call for each layer, and no temporary above an activation; elsewhere parts of a bounded size."""
    name, largest = model.info.name, recorder.largest
    if name in PLAIN:
        assert recorder.count(VARLEN) == 0
        assert largest.output_bytes <= MAX_PART_BYTES, largest
        return
    config: Any = model.module.config
    experts = getattr(config, "num_experts_per_tok", 1)  # which make gate and up in one product
    activation = tokens * experts * config.intermediate_size * (2 if experts > 1 else 1)
    assert recorder.count(VARLEN) == LAYERS * steps
    assert largest.output_bytes <= 2 * max(rows * config.vocab_size, activation), largest


@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_step(name: str, real_model: Callable[[str], LoadedModel]) -> None:
    model = real_model(name)
    logits, recorder = captured_step(model)
    assert logits.device.type == "cuda"
    assert logits.shape == (SEQUENCES * WIDTH, model.info.vocabulary_size)
    _check(model, recorder, SEQUENCES * WIDTH, SEQUENCES * WIDTH)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_eager_step_of_prompts_verifications_and_decodes(
    name: str, real_model: Callable[[str], LoadedModel]
) -> None:
    model = real_model(name)
    logits, recorder = eager_step(model, MIX)
    assert logits.device.type == "cuda"
    assert logits.shape == (len(MIX), model.info.vocabulary_size)
    _check(model, recorder, sum(MIX), len(MIX))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_proposal(name: str, real_model: Callable[[str], LoadedModel]) -> None:
    model, capture = real_model(name), RecordingCapture()
    loop = _Loop(graph_context(model, capture), Bucket(SEQUENCES, 2), COUNT, TOP_K)
    parts = segments(model, [2] * SEQUENCES, tokens_ahead=loop.tokens_ahead)
    greedy = [0] * (4 + COUNT) * SEQUENCES
    with torch.inference_mode():
        loop._inputs.fill(parts, greedy, loop._spare_page)
        drawn: Tensor = loop._replay()
    assert drawn.shape == (COUNT, SEQUENCES, 2 + 2 * TOP_K)
    assert drawn.device.type == "cuda"
    assert capture.recorder is not None
    _check(model, capture.recorder, SEQUENCES * 2, SEQUENCES * 2, COUNT)
