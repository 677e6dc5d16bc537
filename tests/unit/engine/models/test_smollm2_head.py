"""The bundled EAGLE-3 head for SmolLM2-135M-Instruct fits that model. The model itself is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.models.heads.eagle3 import Eagle3Head, load_eagle3, read_eagle3_config
from tandem.engine.models.loading import load_model
from tests.end_to_end.models import random_model, save_model
from tests.paths import SMOLLM2_EAGLE3

HIDDEN_SIZE, LAYERS, VOCABULARY_SIZE = 576, 30, 49_152
END_OF_ANSWER = 2
"""`<|im_end|>`."""
MAX_BYTES = 16 * 1000 * 1000


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    """Loaded for a random model of SmolLM2's width, depth and vocabulary, whose layers are otherwise small."""
    model = random_model(
        1,
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    target = load_model(save_model(model, tmp_path_factory.mktemp("target")), dtype="float32", threads=1)
    return load_eagle3(read_eagle3_config(SMOLLM2_EAGLE3), target)


def test_it_has_smollm2s_shape(head: Eagle3Head) -> None:
    assert (head.state_size, head.vocabulary_size) == (HIDDEN_SIZE, VOCABULARY_SIZE)
    assert head.config.aux_layer_ids is None
    assert head.layer_ids == (2, 15, 27)
    assert head.target_ids is not None
    assert head.fc.weight.shape == (HIDDEN_SIZE, 3 * HIDDEN_SIZE)


def test_its_draft_vocabulary_is_the_same_in_both_directions(head: Eagle3Head) -> None:
    tensors = load_file(SMOLLM2_EAGLE3 / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert head.target_ids is not None
    assert head.target_ids.tolist() == ids.tolist()
    assert END_OF_ANSWER in ids.tolist()


def test_it_is_small(head: Eagle3Head) -> None:
    assert sum(file.stat().st_size for file in Path(SMOLLM2_EAGLE3).iterdir()) <= MAX_BYTES
