"""A folder that cannot be served is refused in one sentence, quickly, and without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tandem.engine.models.checkpoint import eos_token_ids, open_checkpoint, tokenizer_hash
from tandem.errors import ModelFolderError
from tests.unit.engine.models.folders import set_config


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _config_that_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _without_architecture(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _index_without_weight_map(folder: Path) -> None:
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
    set_config(folder, architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)


def _mamba(folder: Path) -> None:
    set_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")


def _linear_attention(folder: Path) -> None:
    set_config(folder, architectures=["NewForCausalLM"], layer_types=["linear_attention", "full_attention"])


def _bad_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')


_DAMAGED: list[tuple[Callable[[Path], None], str]] = [
    (_without_config, "the model folder {f} has no config.json; a Hugging Face model folder has one"),
    (
        _broken_config,
        "the file {f}/config.json should be JSON, but does not parse: Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1)",
    ),
    (_config_that_is_a_list, "the file {f}/config.json should hold a JSON object, but holds a list"),
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
        _index_without_weight_map,
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


@pytest.mark.parametrize(("damage", "sentence"), _DAMAGED, ids=[damage.__name__ for damage, _ in _DAMAGED])
def test_a_damaged_folder_is_refused_in_one_sentence(
    folder: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    damage(folder)
    with pytest.raises(ModelFolderError) as raised:
        open_checkpoint(folder)
    size, header_end = len(weights), 8 + int.from_bytes(weights[:8], "little")
    expected = sentence.format(
        f=folder, size=size, size_less_100=size - 100, size_plus_1=size + 1, header_end=header_end
    )
    assert str(raised.value) == expected


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError) as raised:
        open_checkpoint(tmp_path / "nowhere")
    assert str(raised.value) == (
        f"the model folder {tmp_path}/nowhere should be a directory with a checkpoint, but nothing is there"
    )


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(
        ModelFolderError, match="should be a directory with a checkpoint, but a file is there"
    ):
        open_checkpoint(folder / "config.json")


def test_a_valid_folder_is_described(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.model_type == "llama"
    assert checkpoint.weights.files == (folder / "model.safetensors",)
    assert checkpoint.eos_token_ids == (2,)


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


def test_the_tokenizer_hash_depends_only_on_what_the_ids_mean(tmp_path: Path) -> None:
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


def test_an_invalid_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        tokenizer_hash(folder)
