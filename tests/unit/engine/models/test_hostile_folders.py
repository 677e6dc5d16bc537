"""Hostile model folders are refused in one sentence, before anything of the size they claim is allocated."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Failed, Job
from tandem.engine.core.selection import choose_backends
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine.models.loading import load_model
from tandem.engine.settings import EngineSettings
from tandem.errors import ModelFolderError, NonFiniteLogitsError
from tests.unit.engine.models.folders import INDEX, WEIGHTS, assert_one_sentence, set_config

DEEP = 100_000
"""Levels of nesting that overflow the stack of a recursive parser."""


def write_weights(folder: Path, header: object, data: bytes = b"") -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content + data)


def set_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def set_index(folder: Path, name: object) -> None:
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": name}}))


def tensor(begin: int, end: int, shape: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def sparse(path: Path, header_bytes: int) -> None:
    """Write a sparse file whose header has this length; it takes no space on the disk."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", header_bytes))
        file.truncate(8 + header_bytes)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def replace_by_pipe(path: Path) -> None:
    """Replace the file by a named pipe: opening one to read blocks forever."""
    path.unlink()
    os.mkfifo(path)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "header of 5 GB": (lambda f: sparse(f / WEIGHTS, 5 << 30), "the format allows 100000000"),
    "header beyond the file": (
        lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 64), "its header should end at byte 18446744073709551623"),
    "header of nesting": (lambda f: write_weights(f, b"[" * DEEP), "is damaged"),
    "header of bytes": (lambda f: write_weights(f, b'{"\xff": 1}'), "is damaged"),
    "header that is a list": (lambda f: write_weights(f, []), "is damaged"),
    "offset below zero": (lambda f: write_weights(f, {"a": tensor(-8, 0, [2])}), "is damaged"),
    "offset of text": (
        lambda f: write_weights(f, {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["a", "b"]}}), "is damaged"),
    "offset of infinity": (
        lambda f: write_weights(f, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}'), "is damaged"),
    "overlap": (
        lambda f: write_weights(f, {"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, bytes(8)),
        "invalid offset for tensor `[ab]`"),
    "hole": (lambda f: write_weights(f, {"a": tensor(8, 16, [2])}, bytes(16)), "invalid offset for tensor `a`"),
    "unknown dtype": (lambda f: write_weights(f, {"a": tensor(0, 8, [2], "F31")}, bytes(8)), "unknown variant `F31`"),
    "shape of another size": (
        lambda f: write_weights(f, {"a": tensor(0, 8, [3])}, bytes(8)), "invalid shape, data type, or offset"),
    "shape below zero": (lambda f: write_weights(f, {"a": tensor(0, 8, [-2])}, bytes(8)), "is damaged"),
    "shape beyond all memory": (
        lambda f: write_weights(f, {"a": tensor(0, 8, [1 << 40, 1 << 40])}, bytes(8)), "overflow"),
    "index to elsewhere": (lambda f: set_index(f, "../../secret.safetensors"), "'../../secret.safetensors'"),
    "index to the root": (lambda f: set_index(f, "/etc/x.safetensors"), "inside its folder"),
    "index to a pickle": (lambda f: set_index(f, "pytorch_model.bin"), "should name .safetensors files"),
    "index to a number": (lambda f: set_index(f, 5), "names the file 5"),
    "index to an impossible name": (lambda f: set_index(f, "a\0.safetensors"), "inside its folder"),
    "index to a folder": (lambda f: set_index(f, "."), "names the file '.'"),
    "index of a long name": (lambda f: set_index(f, "a" * 100_000 + ".safetensors"), "cannot be read|incomplete"),
    "config of nesting": (lambda f: (f / "config.json").write_text('{"a":' * DEEP), "nested too deeply"),
    "config of bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "does not parse"),
    "config of a huge number": (
        lambda f: (f / "config.json").write_text('{"vocab_size": ' + "9" * 10_000 + "}"), "does not parse"),
    "config of 1 GiB": (lambda f: os.truncate(f / "config.json", 1 << 30), "at most 16777216"),
    "config of NaN": (lambda f: set_config(f, rope_theta=float("nan")), "does not parse: it holds NaN"),
    "config that is a folder": (lambda f: replace_by_folder(f / "config.json"), "has no config.json"),
    "config that is a pipe": (lambda f: replace_by_pipe(f / "config.json"), "has no config.json"),
    "config that links to itself": (
        lambda f: replace_by_link(f / "config.json", "config.json"), "has no config.json"),
    "weights that are a folder": (lambda f: replace_by_folder(f / WEIGHTS), "has no weights"),
    "weights that are a pipe": (lambda f: replace_by_pipe(f / WEIGHTS), "has no weights"),
    "weights that are a device": (
        lambda f: replace_by_link(f / WEIGHTS, "/dev/zero"), "has no weights"),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), "is truncated or not safetensors"),
    "tokenizer of 1 GiB": (lambda f: os.truncate(f / "tokenizer.json", 1 << 30), "at most 134217728"),
    "chat template of 1 GiB": (lambda f: sparse(f / "chat_template.jinja", 1 << 30), "at most 1048576"),
    "generation config of nesting": (
        lambda f: (f / "generation_config.json").write_text("[" * DEEP), "nested too deeply"),
    "end id below zero": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": -1}'), "has eos_token_id -1"),
    "end id of a fraction": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 1.5}'), "has eos_token_id 1.5"),
    "a million end ids": (
        lambda f: (f / "generation_config.json").write_text(json.dumps({"eos_token_id": [1] * 1_000_000})),
        "up to 256 ids"),
    "weights by another name": (lambda f: set_config(f, transformers_weights="../x.safetensors"), "should have none"),
}  # fmt: skip

NUMBERS: list[tuple[str, object]] = [
    ("num_hidden_layers", 10**7),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", "2"),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", True),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", {}),
    ("hidden_size", "abc"),
    ("hidden_size", 1 << 40),
    ("vocab_size", -5),
    ("head_dim", 0),
    ("num_experts", 10**9),
]


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_is_refused_when_the_folder_is_opened(folder: Path, case: str) -> None:
    damage, sentence = FILES[case]
    damage(folder)
    with pytest.raises(ModelFolderError, match=sentence) as raised:
        open_checkpoint(folder)
    assert_one_sentence(raised.value)


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_an_impossible_size_is_refused(folder: Path, name: str, value: object) -> None:
    set_config(folder, **{name: value})
    with pytest.raises(ModelFolderError, match=f"{name} is .* and must be a whole number from") as raised:
        open_checkpoint(folder)
    assert_one_sentence(raised.value)


def test_one_error_names_all_wrong_sizes(folder: Path) -> None:
    set_config(folder, hidden_size=0, text_config={"num_attention_heads": "x"})
    with pytest.raises(ModelFolderError, match=r"hidden_size is .*; num_attention_heads is") as raised:
        open_checkpoint(folder)
    assert_one_sentence(raised.value)


LOADED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a vocabulary of a billion": (lambda f: set_config(f, vocab_size=10**9), "parameters, and the files hold"),
    "as many layers as tensors": (lambda f: set_config(f, num_hidden_layers=20), "parameters, and the files hold"),
    "a width of other weights": (lambda f: set_config(f, hidden_size=40), "do not fit|describes no|no config"),
    "heads that do not divide": (
        lambda f: set_config(f, num_key_value_heads=3), "do not fit|describes no|no config|cannot be run"),
    "a size of the wrong type": (lambda f: set_config(f, intermediate_size="wide"), "is no config of a llama model"),
    "an activation that is none": (lambda f: set_config(f, hidden_act="nothing"), "describes no LlamaForCausalLM"),
    "rope that is none": (
        lambda f: set_config(f, rope_parameters={"rope_type": "x", "rope_theta": 1.0}), "describes no|no config"),
    "rope that is no number": (
        lambda f: set_config(f, rope_parameters={"rope_type": "default", "rope_theta": -5.0}),
        "come NaN or infinity in model.rotary_emb.inv_freq"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'), "is not a tokenizer"),
    "tokenizer of nesting": (lambda f: (f / "tokenizer.json").write_text("[" * DEEP), "is not a tokenizer"),
    "tokenizer of bytes": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff" * 100), "is not a tokenizer"),
    "weights of NaN": (
        lambda f: set_tensor(f, "model.embed_tokens.weight", lambda t: t.index_fill(0, torch.tensor([5]), torch.nan)),
        "hold NaN or infinity as torch.bfloat16: model.embed_tokens.weight$"),
    "weights of infinity": (
        lambda f: set_tensor(f, "lm_head.weight", lambda t: t * 1e38 * 10), "hold NaN or infinity .*: lm_head.weight$"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOADED)
def test_an_inconsistent_model_is_refused_when_it_is_loaded(folder: Path, case: str) -> None:
    damage, sentence = LOADED[case]
    damage(folder)
    with pytest.raises(ModelFolderError, match=sentence) as raised:
        load_model(folder)
    assert_one_sentence(raised.value)


@pytest.mark.parametrize("kernels", ["off", "auto"])
async def test_a_model_with_non_finite_logits_is_refused_at_warm_up(folder: Path, kernels: str) -> None:
    set_config(folder, rms_norm_eps=-1e9)  # the root of a negative number
    model = load_model(folder, dtype="float32")
    backends = choose_backends(model, compile_mode=kernels)
    engine: Engine[Any, Any] = Engine(model, refuse, EngineSettings(max_sequences=2), backends=backends)
    engine.start()
    try:
        with pytest.raises(NonFiniteLogitsError, match="its weights or its config"):
            await engine.warm_up()
    finally:
        await engine.close()


def refuse(ready: Sequence[Job[Any]], logits: torch.Tensor) -> list[Failed]:
    raise AssertionError("warm-up must not call the head")


def test_weights_that_overflow_the_chosen_dtype_are_refused(folder: Path) -> None:
    set_tensor(folder, "lm_head.weight", lambda weights: weights * 1e6)
    assert load_model(folder, dtype="float32").info.vocabulary_size == 97
    with pytest.raises(ModelFolderError, match=r"as torch\.float16: lm_head\.weight"):
        load_model(folder, dtype="float16")


def test_an_end_id_beyond_the_vocabulary_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 97]}')
    assert load_model(folder).info.eos_token_ids == (2,)
    assert "an eos_token_id is beyond the vocabulary, so no text ends with it" in caplog.messages


def test_a_link_to_a_file_elsewhere_is_followed(folder: Path, tmp_path: Path) -> None:
    """Hugging Face's cache consists of such links."""
    shutil.move(folder / WEIGHTS, tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    assert open_checkpoint(folder).weights.tensor_count == 21
