"""DFlash drafts that cannot be loaded: one sentence names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.names import checkpoint_method
from tandem.engine.models.heads.dflash import load_dflash, read_dflash_config
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError
from tests.dflash_models import save_dflash
from tests.end_to_end.models import random_model, save_model

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Six layers, 32 wide, with 2048 tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(1, num_hidden_layers=6, **shape)
    return load_model(save_model(model, tmp_path_factory.mktemp("target")), dtype="float32", threads=1)


@pytest.fixture
def head(tmp_path: Path, target: LoadedModel) -> Path:
    return save_dflash(tmp_path / "head", target.module)


def refusal(folder: Path, target: LoadedModel) -> str:
    with pytest.raises(ModelFolderError) as error:
        load_dflash(read_dflash_config(folder), target)
    return str(error.value)


CONFIGS: dict[str, tuple[Change, str]] = {
    "another architecture": (
        lambda config: config.update(architectures=["LlamaForCausalLM"]),
        "is no DFlash draft's: architectures is ['LlamaForCausalLM']; it must be ['DFlashDraftModel']",
    ),
    "no block": (
        lambda config: config.pop("block_size"),
        "should have a number of at least 2 in block_size, but it is None",
    ),
    "no options": (
        lambda config: config.pop("dflash_config"),
        "should have an object dflash_config, but it is None",
    ),
    "no mask": (
        lambda config: config["dflash_config"].pop("mask_token_id"),
        "should have a number of at least 0 in mask_token_id, but it is None",
    ),
    "no layers": (
        lambda config: config["dflash_config"].update(target_layer_ids=[]),
        "should have layer numbers in target_layer_ids, but it is []",
    ),
    "windowed layers": (
        lambda config: config.update(layer_types=["full_attention", "sliding_attention"]),
        "has 'sliding_attention' in layer_types; a DFlash draft has full_attention here",
    ),
    "a mask that the target lacks": (
        lambda config: config["dflash_config"].update(mask_token_id=2048),
        "has mask_token_id 2048; it must be one of the 2048 tokens of target",
    ),
    "a layer that the target lacks": (
        lambda config: config["dflash_config"].update(target_layer_ids=[1, 6]),
        "reads the target's states after [2, 7] layers; target",
    ),
    "another target's vocabulary": (
        lambda config: config.update(vocab_size=4096),
        "was made for another target: its vocab_size is 4096, and that of target",
    ),
    "another target's width": (
        lambda config: config.update(hidden_size=64),
        "was made for another target: its hidden_size is 64, and that of target",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_config_is_refused(name: str, head: Path, target: LoadedModel) -> None:
    change, sentence = CONFIGS[name]
    path = head / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert sentence in refusal(head, target)


TENSORS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"),
        "has no tensor layers.1.self_attn.k_norm.weight; it must have one of shape [16] (by config.json)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}),
        "has the shape [32, 32]; it must have [32, 64] (by config.json)",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_refused(name: str, head: Path, target: LoadedModel) -> None:
    change, sentence = TENSORS[name]
    path = head / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    assert sentence in refusal(head, target)


SPECULATORS_CONFIGS: dict[str, tuple[Change, str]] = {
    "another method": (
        lambda config: config.update(speculators_model_type="dspark"),
        "has speculators_model_type 'dspark'; a DFlash draft has 'dflash' here",
    ),
    "no layers' config": (
        lambda config: config.pop("transformer_layer_config"),
        "should have an object transformer_layer_config, but it is None",
    ),
    "layers of another model": (
        lambda config: config["transformer_layer_config"].update(model_type="gemma3"),
        "has model_type 'gemma3' in transformer_layer_config; a DFlash draft has qwen3 or llama here",
    ),
    "windowed layers": (
        lambda config: config["transformer_layer_config"].update(layer_types=["sliding_attention"] * 2),
        "has 'sliding_attention' in layer_types; a DFlash draft has full_attention here",
    ),
    "another kind of block": (
        lambda config: config.update(sample_from_anchor=True),
        "has sample_from_anchor True; a DFlash draft has False here",
    ),
    "another projector": (
        lambda config: config.update(projector_type="domino"),
        "has projector_type 'domino'; a DFlash draft has 'dflash' here",
    ),
    "no mask": (
        lambda config: config.pop("mask_token_id"),
        "should have a number of at least 0 in mask_token_id, but it is None",
    ),
    "no layers of the target": (
        lambda config: config.update(aux_hidden_state_layer_ids=None),
        "should have layer numbers in aux_hidden_state_layer_ids, but it is None",
    ),
    "a layer that the target lacks": (
        lambda config: config.update(aux_hidden_state_layer_ids=[1, 7]),
        "reads the target's states after [1, 7] layers; target",
    ),
    "another target's width": (
        lambda config: config.update(target_hidden_size=64),
        "was made for another target: its target_hidden_size is 64, and that of target",
    ),
    "a draft vocabulary that is none": (
        lambda config: config.update(draft_vocab_size=0),
        "should have a number of at least 1 in draft_vocab_size, but it is 0",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS_CONFIGS)
def test_a_wrong_config_of_the_speculators_format_is_refused(
    name: str, tmp_path: Path, target: LoadedModel
) -> None:
    change, sentence = SPECULATORS_CONFIGS[name]
    folder = save_dflash(tmp_path / "head", target.module, wrapped=True, draft_vocabulary=96)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert sentence in refusal(folder, target)


SPECULATORS_TENSORS: dict[str, tuple[Change, str]] = {
    "no output layer": (
        lambda tensors: tensors.pop("lm_head.weight"),
        "has no tensor lm_head.weight; it must have one of shape [96, 32] (by config.json)",
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


@pytest.mark.parametrize("name", SPECULATORS_TENSORS)
def test_wrong_tensors_of_the_speculators_format_are_refused(
    name: str, tmp_path: Path, target: LoadedModel
) -> None:
    change, sentence = SPECULATORS_TENSORS[name]
    folder = save_dflash(tmp_path / "head", target.module, wrapped=True, draft_vocabulary=96)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    assert sentence in refusal(folder, target)


def test_layers_may_be_configured_as_llamas(tmp_path: Path, target: LoadedModel) -> None:
    """Speculators writes such configs too; its layers have norms of queries and keys either way."""
    folder = save_dflash(tmp_path / "head", target.module, wrapped=True)
    path = folder / "config.json"
    plain = load_dflash(read_dflash_config(folder), target)
    config = json.loads(path.read_text())
    config["transformer_layer_config"] |= {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1}
    path.write_text(json.dumps(config))
    found = load_dflash(read_dflash_config(folder), target)
    assert found.layers == plain.layers
    assert all(map(torch.equal, found.state_dict().values(), plain.state_dict().values()))


def test_newer_configs_have_the_block_size_among_the_options(head: Path) -> None:
    path = head / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["block_size"] = config.pop("block_size")
    path.write_text(json.dumps(config))
    assert read_dflash_config(head).block_size == 5


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_method_is_inferred_from_the_config(wrapped: bool, tmp_path: Path, target: LoadedModel) -> None:
    assert checkpoint_method(save_dflash(tmp_path / "head", target.module, wrapped=wrapped)) == "dflash"


def test_rotary_frequencies_stay_in_float32(head: Path, target: LoadedModel, tmp_path: Path) -> None:
    wide = load_dflash(read_dflash_config(head), target)
    folder = save_model(target.module, tmp_path / "narrow")
    narrow = load_dflash(read_dflash_config(head), load_model(folder, dtype="bfloat16", threads=1))
    assert narrow.fc.weight.dtype == torch.bfloat16
    for name, buffer in wide.rotary_emb.named_buffers():
        assert torch.equal(buffer, dict(narrow.rotary_emb.named_buffers())[name])
