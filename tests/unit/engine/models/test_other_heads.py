"""EAGLE and Medusa checkpoints that cannot be loaded: one sentence names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.heads.eagle import EagleHead
from tandem.engine.models.heads.loading import head_loader
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError
from tests.eagle_heads import save_eagle
from tests.end_to_end.models import random_model, save_model
from tests.medusa_heads import save_medusa

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two layers, 32 wide, with 2048 tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(1, num_hidden_layers=2, **shape)
    return load_model(save_model(model, tmp_path_factory.mktemp("target")), dtype="float32", threads=1)


def refusal(method: str, folder: Path, target: LoadedModel) -> str:
    with pytest.raises(ModelFolderError) as error:
        head_loader(folder, method)(target)
    return str(error.value)


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


EAGLE_CONFIGS: dict[str, tuple[Change, str]] = {
    "a whole model": (
        lambda config: config.update(num_hidden_layers=8),
        "has num_hidden_layers 8; an EAGLE head has 1 here",
    ),
    "EAGLE-3's": (
        lambda config: config.update(draft_vocab_size=96),
        "has draft_vocab_size 96, which an EAGLE head does not have; it should be a Llama config of one layer",
    ),
    "a wrapped format without its layer": (
        lambda config: config.update(speculators_model_type="eagle"),
        "should have an object transformer_layer_config, but it is None",
    ),
    "another method of speculators": (
        lambda config: config.update(speculators_model_type="peagle"),
        "has speculators_model_type 'peagle'; an EAGLE head has 'eagle' here",
    ),
    "a reduced vocabulary": (
        lambda config: config.update(truncated_vocab_size=96),
        "has truncated_vocab_size 96; an EAGLE head has the whole vocabulary here, 2048",
    ),
    "no width": (
        lambda config: config.pop("hidden_size"),
        "should have a number of at least 1 in hidden_size, but it is None",
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


@pytest.mark.parametrize("name", EAGLE_CONFIGS)
def test_a_wrong_config_of_eagle_is_refused(name: str, tmp_path: Path, target: LoadedModel) -> None:
    change, sentence = EAGLE_CONFIGS[name]
    folder = save_eagle(tmp_path / "head", target.module)
    changed_config(folder, change)
    assert sentence in refusal("eagle", folder, target)


EAGLE_TENSORS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
        "has no tensor layers.0.mlp.up_proj.weight; it must have one of shape [48, 32] (by config.json)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 96)}),
        "the tensor fc.weight of the drafting head in",
    ),
    "another embedding": (
        lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(96, 32)}),
        "has the shape [96, 32]; it must have [2048, 32] (by config.json)",
    ),
}


@pytest.mark.parametrize("name", EAGLE_TENSORS)
def test_wrong_tensors_of_eagle_are_refused(name: str, tmp_path: Path, target: LoadedModel) -> None:
    change, sentence = EAGLE_TENSORS[name]
    folder = save_eagle(tmp_path / "head", target.module)
    changed_tensors(folder, change)
    assert sentence in refusal("eagle", folder, target)


SPECULATORS_CONFIGS: dict[str, tuple[Change, str]] = {
    "another layer": (
        lambda config: config.update(transformer_layer_architecture="Qwen3DecoderLayer"),
        "has transformer_layer_architecture 'Qwen3DecoderLayer'; an EAGLE head has 'LlamaDecoderLayer' here",
    ),
    "two layers": (
        lambda config: config["transformer_layer_config"].update(num_hidden_layers=2),
        "has num_hidden_layers 2; an EAGLE head has 1 here",
    ),
    "a flag that is none": (
        lambda config: config.update(layernorms="yes"),
        "should have true or false for layernorms, but it is 'yes'",
    ),
    "a bias that is missing": (
        lambda config: config.update(fusion_bias=True),
        "has no tensor fusion_fc.bias; it must have one of shape [32] (by config.json)",
    ),
    "norms that are missing": (
        lambda config: config.update(layernorms=True),
        "has no tensor embedding_layernorm.weight; it must have one of shape [32] (by config.json)",
    ),
    "another target's vocabulary": (
        lambda config: config["transformer_layer_config"].update(vocab_size=4096),
        "was made for another target: its vocab_size is 4096, and that of target",
    ),
    "another target's width": (
        lambda config: config["transformer_layer_config"].update(hidden_size=64),
        "was made for another target: its hidden_size is 64, and that of target",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS_CONFIGS)
def test_a_wrong_config_of_the_speculators_format_is_refused(
    name: str, tmp_path: Path, target: LoadedModel
) -> None:
    change, sentence = SPECULATORS_CONFIGS[name]
    folder = save_eagle(tmp_path / "head", target.module, form="speculators")
    changed_config(folder, change)
    assert sentence in refusal("eagle", folder, target)


SPECULATORS_TENSORS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        lambda tensors: tensors.pop("transformer.mlp.up_proj.weight"),
        "has no tensor transformer.mlp.up_proj.weight; it must have one of shape [48, 32] (by config.json)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"fusion_fc.weight": torch.zeros(32, 96)}),
        "has the shape [32, 96]; it must have [32, 64] (by config.json)",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS_TENSORS)
def test_wrong_tensors_of_the_speculators_format_are_refused(
    name: str, tmp_path: Path, target: LoadedModel
) -> None:
    change, sentence = SPECULATORS_TENSORS[name]
    folder = save_eagle(tmp_path / "head", target.module, form="speculators")
    changed_tensors(folder, change)
    assert sentence in refusal("eagle", folder, target)


@pytest.mark.parametrize(("embedding", "is_shared"), [("none", True), ("copied", True), ("own", False)])
def test_a_copy_of_the_targets_embedding_takes_no_memory(
    embedding: str, is_shared: bool, tmp_path: Path, target: LoadedModel
) -> None:
    head = head_loader(save_eagle(tmp_path, target.module, embedding=embedding), "eagle")(target)
    assert isinstance(head, EagleHead)
    module: Any = target.module
    targets = module.get_input_embeddings().weight
    assert (head.embed_tokens.weight.data_ptr() == targets.data_ptr()) is is_shared


MEDUSA_CONFIGS: dict[str, tuple[Change, str]] = {
    "another model": (
        lambda config: config.update(model_type="llama"),
        "is not that of Medusa heads: model_type is 'llama' and has to be medusa, or there has to be a number "
        "medusa_num_heads",
    ),
    "no number of heads": (
        lambda config: config.pop("num_heads"),
        "should have a number of at least 1 in medusa_num_heads, but it is None",
    ),
    "more heads than there are": (
        lambda config: config.update(num_heads=5),
        "has no tensor blocks.4.layers.0.weight; it must have one of shape [32, 32] (by config.json and the target)",
    ),
    "another target's vocabulary": (
        lambda config: config.update(vocab_size=4096),
        "was made for another target: its vocab_size is 4096, and that of target",
    ),
    "another target's width": (
        lambda config: config.update(hidden_size=64),
        "was made for another target: its hidden_size is 64, and that of target",
    ),
    "some tokens and no map": (
        lambda config: config.update(truncated_vocab_size=96),
        "has no tensor token_map; it must have one of shape [96]",
    ),
}


@pytest.mark.parametrize("name", MEDUSA_CONFIGS)
def test_a_wrong_config_of_medusa_is_refused(name: str, tmp_path: Path, target: LoadedModel) -> None:
    change, sentence = MEDUSA_CONFIGS[name]
    folder = save_medusa(tmp_path / "head", target.module)
    changed_config(folder, change)
    assert sentence in refusal("medusa", folder, target)


MEDUSA_TENSORS: dict[str, tuple[Change, str]] = {
    "a missing output layer": (
        lambda tensors: tensors.pop("2.1.weight"),
        "has no tensor lm_heads.2.weight; it must have one of shape [96, 32] (by config.json and the target)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"1.0.linear.weight": torch.zeros(16, 32)}),
        "the tensor 1.0.linear.weight of the drafting head in",
    ),
    "ids that the target lacks": (
        lambda tensors: tensors.update(token_map=torch.arange(2000, 2096)),
        "leads to ids from 2000 to 2095; it must hold distinct ids in 0..2047",
    ),
}


@pytest.mark.parametrize("name", MEDUSA_TENSORS)
def test_wrong_tensors_of_medusa_are_refused(name: str, tmp_path: Path, target: LoadedModel) -> None:
    change, sentence = MEDUSA_TENSORS[name]
    folder = save_medusa(tmp_path / "head", target.module, published=True, draft_vocabulary=96)
    changed_tensors(folder, change)
    assert sentence in refusal("medusa", folder, target)


def test_published_heads_of_another_width_are_refused_by_their_tensors(
    tmp_path: Path, target: LoadedModel
) -> None:
    other = random_model(2, num_hidden_layers=1, hidden_size=48, num_attention_heads=2, num_key_value_heads=1)
    folder = save_medusa(tmp_path / "head", other, published=True)
    sentence = "has the shape [48, 48]; it must have [32, 32] (by config.json and the target)"
    assert sentence in refusal("medusa", folder, target)
