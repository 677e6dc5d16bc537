"""A folder that cannot be served is told of in one sentence, fast, and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tandem.engine.models.checkpoint import eos_token_ids, open_checkpoint, tokenizer_hash
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError, ModelFolderError
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.tiny_models import hf, save_tokenizer


@pytest.fixture
def folder(llama: TinyModel, tmp_path: Path) -> Path:
    """A good checkpoint that a test may spoil."""
    return Path(shutil.copytree(llama.folder, tmp_path / "model"))


def _set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _config_of_nothing(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _without_architecture(folder: Path) -> None:
    _set_config(folder, architectures=None)


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _truncated_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def _overlong(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def _damaged_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8] = ord("[")
    path.write_bytes(content)


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _encoder_decoder(folder: Path) -> None:
    _set_config(folder, architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)


def _mamba(folder: Path) -> None:
    _set_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")


def _linear_attention(folder: Path) -> None:
    _set_config(folder, architectures=["NewForCausalLM"], layer_types=["linear_attention", "full_attention"])


def _bad_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')


_SPOILT: list[tuple[Callable[[Path], None], str]] = [
    (_without_config, "the model folder {f} has no config.json; a Hugging Face model folder has one"),
    (
        _broken_config,
        "the file {f}/config.json should be JSON, but does not parse: Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1)",
    ),
    (_config_of_nothing, "the file {f}/config.json should hold a JSON object, but holds a list"),
    (
        _without_architecture,
        "the file {f}/config.json names no model class: 'architectures' is None and should be a list such as "
        "['LlamaForCausalLM']",
    ),
    (
        _pickle_only,
        "the model folder {f} has its weights only as pickle (pytorch_model.bin), which can run code when it is "
        "loaded; convert it once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
    ),
    (
        _without_weights,
        "the model folder {f} has no weights: neither model.safetensors nor model.safetensors.index.json",
    ),
    (
        _missing_shard,
        "the checkpoint in {f} is incomplete: model.safetensors.index.json names 2 files, of which these are "
        "missing: model-00002-of-00002.safetensors",
    ),
    (
        _index_of_nothing,
        "the file {f}/model.safetensors.index.json should have a 'weight_map' from tensor names to files, but has "
        "none",
    ),
    (
        _truncated,
        "the file {f}/model.safetensors is truncated: its header describes {size} bytes, but it has {size_less_100}",
    ),
    (
        _truncated_header,
        "the file {f}/model.safetensors is truncated or not safetensors: its header should end at byte {header_end}, "
        "but the file has 20 bytes",
    ),
    (
        _overlong,
        "the file {f}/model.safetensors is damaged: its header describes {size} bytes, but it has {size_plus_1}",
    ),
    (
        _damaged_header,
        "the file {f}/model.safetensors is damaged: its header is not that of a safetensors file",
    ),
    (
        _without_tokenizer,
        "the model folder {f} has no tokenizer.json, which is needed to compare vocabularies",
    ),
    (
        _encoder_decoder,
        "the model in {f} is an encoder-decoder (T5ForConditionalGeneration); only decoder-only models can be served",
    ),
    (
        _mamba,
        "the model in {f} (MambaForCausalLM) keeps recurrent state, which cannot be rolled back when a proposed token "
        "is rejected; a model with attention layers only is needed",
    ),
    (
        _linear_attention,
        "the model in {f} (NewForCausalLM) keeps recurrent state, which cannot be rolled back when a proposed token "
        "is rejected; a model with attention layers only is needed",
    ),
    (
        _bad_eos,
        "the file {f}/generation_config.json has eos_token_id '</s>'; it should be an id or a list of up to "
        "256 ids",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), _SPOILT, ids=[spoil.__name__ for spoil, _ in _SPOILT])
def test_a_spoilt_folder_is_told_of_in_one_sentence(
    folder: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    spoil(folder)
    with pytest.raises(ModelFolderError) as raised:
        open_checkpoint(folder)
    size, header_end = len(weights), 8 + int.from_bytes(weights[:8], "little")
    expected = sentence.format(
        f=folder, size=size, size_less_100=size - 100, size_plus_1=size + 1, header_end=header_end
    )
    assert str(raised.value) == expected


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError) as raised:
        open_checkpoint(tmp_path / "nowhere")
    assert str(raised.value) == (
        f"the model folder {tmp_path}/nowhere should be a directory with a checkpoint, but nothing is there"
    )


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    with pytest.raises(
        ModelFolderError, match="should be a directory with a checkpoint, but a file is there"
    ):
        open_checkpoint(folder / "config.json")


def test_a_good_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.model_type == "llama"
    assert checkpoint.weights.files == (folder / "model.safetensors",)
    assert checkpoint.eos_token_ids == (2,)


def test_a_sharded_checkpoint_loads(llama: TinyModel, tmp_path: Path) -> None:
    llama.reference.save_pretrained(tmp_path, max_shard_size="10KB")
    save_tokenizer(tmp_path)
    assert len(open_checkpoint(tmp_path).weights.files) > 1
    assert load_model(tmp_path, dtype="float32").info.parameter_count == llama.loaded.info.parameter_count


def test_checking_a_folder_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys; from tandem.engine.models.checkpoint import open_checkpoint, tokenizer_hash; "
        f"open_checkpoint({str(folder)!r}); tokenizer_hash({str(folder)!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[4]).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 7}, (7,)),
        ({}, {"text_config": {"eos_token_id": [8]}}, (8,)),
        ({}, {}, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation_config: dict[str, object], config: dict[str, object], expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path) == expected


def test_the_tokenizer_hash_tells_what_ids_mean(tmp_path: Path) -> None:
    def saved(name: str, vocabulary: dict[str, int], *, added: str | None = None) -> str:
        (tmp_path / name).mkdir()
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
        if added is not None:
            tokenizer.add_special_tokens([AddedToken(added)])
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        return tokenizer_hash(tmp_path / name)

    base = saved("base", {"a": 0, "b": 1})
    assert base == saved("reordered", {"b": 1, "a": 0})
    assert len({base, saved("swapped", {"a": 1, "b": 0}), saved("longer", {"a": 0, "b": 1}, added="c")}) == 3
    assert saved("own", {"a": 0, "b": 1, "c": 2}) == saved("added", {"a": 0, "b": 1}, added="c")


def test_a_tokenizer_that_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        tokenizer_hash(folder)


def test_an_architecture_that_transformers_does_not_know(folder: Path) -> None:
    _set_config(folder, architectures=["NovelForCausalLM"], model_type="novel")
    with pytest.raises(ModelFolderError) as raised:
        load_model(folder)
    assert str(raised.value) == (
        f"the model in {folder} has the architecture NovelForCausalLM (model_type 'novel'), which transformers "
        f"{hf.__version__} does not know as a causal language model"
    )


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError) as raised:
        load_model(folder)
    assert str(raised.value) == (
        f"the weights in {folder} do not fit LlamaForCausalLM: missing: lm_head.weight and 1 more"
    )


def test_weights_of_another_shape(folder: Path) -> None:
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
def test_options_that_cannot_be_had(folder: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, **options)  # type: ignore[arg-type]
    assert str(raised.value) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where there is no GPU")
def test_a_gpu_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, device="cuda:1")
    assert str(raised.value) == "the device is 'cuda:1', but torch sees 0 CUDA devices"


def test_what_a_model_says_of_itself(llama: TinyModel, folder: Path) -> None:
    info = load_model(folder, dtype="bfloat16", name="tiny").info
    assert (info.name, info.architecture, info.dtype) == ("tiny", "LlamaForCausalLM", "bfloat16")
    assert (info.vocabulary_size, info.max_length, info.eos_token_ids) == (97, 192, (2,))
    assert info.tokenizer_hash == tokenizer_hash(folder)
    assert info.parameter_count == sum(parameter.numel() for parameter in llama.reference.parameters())
