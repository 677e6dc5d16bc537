"""A model whose weights or config do not fit is refused in one sentence; a valid one describes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.checkpoint import open_checkpoint, tokenizer_hash
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError, ModelFolderError
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.models.folders import set_config
from tests.unit.engine.tiny_models import hf, save_tokenizer


def test_a_sharded_checkpoint_loads(llama: TinyModel, tmp_path: Path) -> None:
    llama.reference.save_pretrained(tmp_path, max_shard_size="10KB")
    save_tokenizer(tmp_path)
    assert len(open_checkpoint(tmp_path).weights.files) > 1
    assert load_model(tmp_path, dtype="float32").info.parameter_count == llama.loaded.info.parameter_count


def test_an_architecture_unknown_to_transformers_is_refused(folder: Path) -> None:
    set_config(folder, architectures=["NovelForCausalLM"], model_type="novel")
    with pytest.raises(ModelFolderError) as raised:
        load_model(folder)
    assert str(raised.value) == (
        f"the model in {folder} has the architecture NovelForCausalLM (model_type 'novel'), which transformers "
        f"{hf.__version__} does not know as a causal language model"
    )


def test_missing_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError) as raised:
        load_model(folder)
    assert str(raised.value) == (
        f"the weights in {folder} do not fit LlamaForCausalLM: missing: lm_head.weight and 1 more"
    )


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(33)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError) as raised:
        load_model(folder)
    assert str(raised.value) == (
        f"the weights in {folder} do not fit LlamaForCausalLM: not of the shape that config.json says: "
        "model.norm.weight"
    )


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_model(tmp_path).info.vocabulary_size == 97


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        ("MambaConfig", {"state_size": 4}),
        ("RecurrentGemmaConfig", {"num_attention_heads": 2, "intermediate_size": 32}),
    ],
)
def test_models_with_recurrent_state_are_refused(
    tmp_path: Path, config_class: str, options: dict[str, object]
) -> None:
    config = getattr(hf, config_class)(vocab_size=97, hidden_size=16, num_hidden_layers=3, **options)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelFolderError, match="keeps recurrent state, which cannot be rolled back"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "tpu"}, "the device is 'tpu' and should be cpu, cuda or cuda:N"),
        ({"device": "meta"}, "the device is 'meta' and should be cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, "the dtype is 'int8' and should be one of float32, bfloat16, float16"),
        ({"threads": 0}, "threads is 0 and must be at least 1"),
    ],
)
def test_invalid_options_are_refused(folder: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, **options)  # type: ignore[arg-type]
    assert str(raised.value) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, device="cuda:1")
    assert str(raised.value) == "the device is 'cuda:1', but torch sees 0 CUDA devices"


def test_a_loaded_model_describes_itself(llama: TinyModel, folder: Path) -> None:
    info = load_model(folder, dtype="bfloat16", name="tiny").info
    assert (info.name, info.architecture, info.dtype) == ("tiny", "LlamaForCausalLM", "bfloat16")
    assert (info.vocabulary_size, info.max_length, info.eos_token_ids) == (97, 192, (2,))
    assert info.tokenizer_hash == tokenizer_hash(folder)
    assert info.parameter_count == sum(parameter.numel() for parameter in llama.reference.parameters())
