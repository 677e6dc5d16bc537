"""Checkpoints of drafting heads that cannot be loaded: one sentence names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.heads.eagle3 import load_eagle3, read_eagle3_config
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError
from tests.end_to_end.models import random_model, save_model
from tests.heads import save_eagle3

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Six layers, 32 wide, with 2048 tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(1, num_hidden_layers=6, **shape)
    return load_model(save_model(model, tmp_path_factory.mktemp("target")), dtype="float32", threads=1)


@pytest.fixture
def head(tmp_path: Path, target: LoadedModel) -> Path:
    return save_eagle3(tmp_path / "head", target.module)


def changed_config(folder: Path, change: Change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def changed_tensors(folder: Path, change: Change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refusal(folder: Path, target: LoadedModel) -> str:
    with pytest.raises(ModelFolderError) as error:
        load_eagle3(read_eagle3_config(folder), target)
    return str(error.value)


CONFIGS: dict[str, tuple[Change, str]] = {
    "another architecture": (
        lambda config: config.update(architectures=["LlamaForCausalLM"]),
        "is no EAGLE-3 head's: speculators_model_type is None and architectures is ['LlamaForCausalLM'], of which one "
        "must name eagle3, as in LlamaForCausalLMEagle3",
    ),
    "another method of speculators": (
        lambda config: config.update(speculators_model_type="peagle"),
        "is no EAGLE-3 head's: speculators_model_type is 'peagle'",
    ),
    "no width": (
        lambda config: config.pop("hidden_size"),
        "should have a number of at least 1 in hidden_size, but it is None",
    ),
    "a flag that is none": (
        lambda config: config.update(norm_output="yes"),
        "should have true or false for norm_output, but it is 'yes'",
    ),
    "two layers": (
        lambda config: config.update(num_hidden_layers=2),
        "has num_hidden_layers 2; an EAGLE-3 head has 1 here",
    ),
    "two of the target's layers": (
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2]),
        "should have 3 layer numbers in eagle_aux_hidden_state_layer_ids",
    ),
    "a layer that the target lacks": (
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 7]),
        "reads the target's states after [1, 2, 7] layers; target",
    ),
    "another target's vocabulary": (
        lambda config: config.update(vocab_size=4096),
        "was made for another target: its vocab_size is 4096, and that of target",
    ),
    "another target's width": (
        lambda config: config.update(target_hidden_size=64),
        "was made for another target: its target_hidden_size is 64, and that of target",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_config_is_refused(name: str, head: Path, target: LoadedModel) -> None:
    change, sentence = CONFIGS[name]
    changed_config(head, change)
    assert sentence in refusal(head, target)


TENSORS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"),
        "has no tensor midlayer.mlp.up_proj.weight; it must have one of shape [48, 32] (by config.json)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}),
        "has the shape [32, 64]; it must have [32, 96] (by config.json)",
    ),
    "no offsets": (
        lambda tensors: tensors.pop("d2t"),
        "has no tensor d2t; it must have one of shape [96]",
    ),
    "ids in place of offsets": (
        lambda tensors: tensors.update(d2t=torch.arange(2048 - 96, 2048)),
        "leads to ids from 1952 to 2142; it must hold offsets that lead to distinct ids in 0..2047",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_refused(name: str, head: Path, target: LoadedModel) -> None:
    change, sentence = TENSORS[name]
    changed_tensors(head, change)
    assert sentence in refusal(head, target)


def test_a_wrapped_config_needs_its_layer(tmp_path: Path, target: LoadedModel) -> None:
    folder = save_eagle3(tmp_path / "head", target.module, wrapped=True)
    changed_config(folder, lambda config: config.pop("transformer_layer_config"))
    assert "should have an object transformer_layer_config, but it is None" in refusal(folder, target)


def test_flags_of_nvidias_nested_config_count(head: Path) -> None:
    nested = {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    changed_config(head, lambda config: config.update(eagle_config=nested))
    config = read_eagle3_config(head)
    assert config.norm_before_fc
    assert config.aux_layer_ids == (0, 2, 4)
    assert not config.norm_before_residual
