"""Targets whose checkpoints have no usable layer for multi-token prediction: one sentence names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.heads.mtp import load_mtp, read_mtp_config
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError
from tests.end_to_end.models import save_model
from tests.mtp_models import mtp_target, save_mtp
from tests.qwen_mtp_models import FAMILIES as QWEN_FAMILIES
from tests.qwen_mtp_models import qwen_target, save_qwen_mtp

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_mtp(mtp_target("deepseek_v3", vocabulary=64), tmp_path / "target")


def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", threads=1)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as error:
        load_mtp(read_mtp_config(folder), loaded(folder))
    return str(error.value)


def changed_tensors(folder: Path, change: Change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": (
        {"model_type": "llama"},
        "has the model_type 'llama'; the method mtp needs a model with layers for multi-token prediction, and here "
        "that is one of deepseek_v3, glm4_moe, qwen3, qwen3_moe, qwen3_next",
    ),
    "no prediction layers": (
        {"num_nextn_predict_layers": 0},
        "has no layers for multi-token prediction: num_nextn_predict_layers is 0; it must be at least 1",
    ),
    "no experts": (
        {"n_routed_experts": None},
        "should have a number of at least 1 in n_routed_experts, but it is None",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_config_is_refused(name: str, folder: Path) -> None:
    values, sentence = CONFIGS[name]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelFolderError) as error:
        read_mtp_config(folder)
    assert sentence in str(error.value)


TENSORS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        lambda tensors: tensors.pop("model.layers.3.enorm.weight"),
        "has no tensor model.layers.3.enorm.weight; it must have one of shape [32] (by config.json)",
    ),
    "a missing expert": (
        lambda tensors: tensors.pop("model.layers.3.mlp.experts.2.up_proj.weight"),
        "has no tensor model.layers.3.mlp.experts.2.up_proj.weight; it must have one of shape [16, 32]",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(32, 32)}),
        "has the shape [32, 32]; it must have [32, 64] (by config.json)",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_refused(name: str, folder: Path) -> None:
    change, sentence = TENSORS[name]
    changed_tensors(folder, change)
    assert sentence in refusal(folder)


@pytest.fixture(params=QWEN_FAMILIES)
def separate(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A target with its layer in Qwen3-Next's layout."""
    return save_qwen_mtp(qwen_target(request.param, vocabulary=64), tmp_path / "target")


SEPARATE_TENSORS: dict[str, tuple[Change, str]] = {
    "a missing norm": (
        lambda tensors: tensors.pop("mtp.pre_fc_norm_hidden.weight"),
        "has no tensor mtp.pre_fc_norm_hidden.weight; it must have one of shape [32] (by config.json)",
    ),
    "a missing tensor of the block": (
        lambda tensors: tensors.pop("mtp.layers.0.self_attn.k_norm.weight"),
        "has no tensor mtp.layers.0.self_attn.k_norm.weight; it must have one of shape [16] (by config.json)",
    ),
    "a wrong shape": (
        lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(32, 32)}),
        "the tensor mtp.fc.weight of the drafting head in",
    ),
}


@pytest.mark.parametrize("name", SEPARATE_TENSORS)
def test_wrong_tensors_of_qwens_layout_are_refused(name: str, separate: Path) -> None:
    change, sentence = SEPARATE_TENSORS[name]
    changed_tensors(separate, change)
    assert sentence in refusal(separate)


def test_a_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Qwen3-Next's queries come with a gate, so they are twice as wide."""
    folder = save_qwen_mtp(qwen_target("qwen3", vocabulary=64), tmp_path / "target")
    wide = {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(64, 32)}
    changed_tensors(folder, lambda tensors: tensors.update(wide))
    assert "has the shape [64, 32]; it must have [32, 32] (by config.json)" in refusal(folder)


def test_a_checkpoint_of_qwen_without_a_layer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    save_model(qwen_target("qwen3", vocabulary=64), folder)
    with pytest.raises(ModelFolderError, match=r"multi-token prediction: it has no tensor mtp\.fc\.weight"):
        read_mtp_config(folder)


def test_no_prediction_layers_by_qwens_later_configs(tmp_path: Path) -> None:
    folder = save_qwen_mtp(qwen_target("qwen3", vocabulary=64), tmp_path / "target")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ModelFolderError, match="mtp_num_hidden_layers is 0; it must be at least 1"):
        read_mtp_config(folder)


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    """As transformers itself keeps them, and as some exporters write them."""
    folder = save_qwen_mtp(qwen_target("qwen3_moe", vocabulary=64), tmp_path / "target")
    target = loaded(folder)
    apart = load_mtp(read_mtp_config(folder), target).layer.state_dict()
    name = "mlp.experts.down_proj"
    changed_tensors(folder, lambda tensors: tensors.update(
        {f"mtp.layers.0.{name}": 2 * apart[f"mtp_block.{name}"]}
    ))  # fmt: skip
    together = load_mtp(read_mtp_config(folder), target).layer.state_dict()
    assert torch.equal(together[f"mtp_block.{name}"], 2 * apart[f"mtp_block.{name}"])


@pytest.mark.parametrize("layer_types", [None, ["linear_attention", "full_attention", "full_attention"]])
def test_qwen3_next_with_recurrent_layers_is_refused(layer_types: list[str] | None, tmp_path: Path) -> None:
    folder = save_qwen_mtp(qwen_target("qwen3_next", vocabulary=64), tmp_path / "target")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": layer_types}))
    with pytest.raises(ModelFolderError, match="keeps recurrent state, which cannot be rolled back"):
        loaded(folder)


def test_embedding_and_output_head_are_the_targets(folder: Path) -> None:
    target = loaded(folder)
    module: Any = target.module
    head = load_mtp(read_mtp_config(folder), target)
    assert head.embed_tokens.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
    assert head.lm_head.weight.data_ptr() == module.get_output_embeddings().weight.data_ptr()
