"""A folder that cannot be served is refused in one sentence, before memory is allocated; others load shard by shard."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tandem.engine.core.jobs import Failed, Job
from tandem.engine.core.selection import choose_backends
from tandem.engine.models import loading
from tandem.engine.models.checkpoint import eos_token_ids, open_checkpoint, tokenizer_hash
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError, ModelFolderError, NonFiniteLogitsError
from tandem.model_sources.find import find_model
from tests.end_to_end.processes import run
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import running
from tests.unit.engine.models.test_head_files import changed_tensors, of
from tests.unit.engine.tiny_models import hf, save_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEEP = 100_000
"""Levels of nesting that overflow the stack of a recursive parser."""


@pytest.fixture
def folder(llama: TinyModel, tmp_path: Path) -> Path:
    """A valid checkpoint that the test may damage."""
    return Path(shutil.copytree(llama.folder, tmp_path / "model"))


def write_weights(folder: Path, header: object, data: bytes = b"") -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content + data)


def set_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    changed_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def set_index(folder: Path, name: object) -> None:
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": name}}))


def tensor(begin: int, end: int, shape: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


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


def assert_refused(sentence: str, open_it: Callable[[], object]) -> None:
    """Refused in one short line, as users should see it, which has these words."""
    with pytest.raises(ModelFolderError, match=sentence) as raised:
        open_it()
    assert_one_sentence(raised.value)


def assert_one_sentence(error: ModelFolderError) -> None:
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 1000
    assert not text.endswith(".")


@pytest.fixture
def guest() -> Iterator[Path]:
    """A folder that everybody sees, and this process as a user that owns nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        if os.geteuid() == 0:
            os.seteuid(12_345)
        try:
            yield folder
        finally:
            os.seteuid(os.getuid())


@pytest.mark.parametrize(
    ("closed", "named"),
    [
        ("Model/model.safetensors", "Model/model.safetensors"),
        ("Model/config.json", "Model/config.json"),
        ("Model/tokenizer.json", "Model/tokenizer.json"),
        ("Model", "Model/config.json"),
        ("", "Model"),
    ],
)
def test_a_file_that_others_may_not_read_is_named_with_its_reason(
    guest: Path, llama: TinyModel, closed: str, named: str
) -> None:
    euid = os.geteuid()
    os.seteuid(os.getuid())
    shutil.copytree(llama.folder, guest / "Model")
    for path in (guest / "Model", *(guest / "Model").iterdir()):
        path.chmod(0o755)
    (guest / closed).chmod(0)
    os.seteuid(euid)
    # The weights come before the tokenizer.
    read: Callable[[Path], object] = tokenizer_hash if "tokenizer" in closed else open_checkpoint
    try:
        with pytest.raises(ModelFolderError) as raised:
            read(find_model(guest / "Model"))
    finally:
        os.seteuid(os.getuid())
        (guest / closed).chmod(0o755)
    said = str(raised.value)
    assert said == f"the file {guest / named} cannot be read: permission denied"


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "header of 5 GB": (lambda f: sparse(f / WEIGHTS, 5 << 30), "header too large"),
    "header of nesting": (lambda f: write_weights(f, b"[" * DEEP), "is damaged"),
    "hole": (lambda f: write_weights(f, {"a": tensor(8, 16, [2])}, bytes(16)), "invalid offset for tensor `a`"),
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
    "truncated": (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 100), "is damaged: .*incomplete"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; a Hugging Face model folder has one"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "does not parse: .*line 1"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "no architecture": (lambda f: set_config(f, architectures=...), "names no model class"),
    "pickle alone": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "only as pickle .*pytorch_model.bin"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no weights: neither"),
    "missing shard": (
        lambda f: set_index(f, "model-00002-of-00002.safetensors"), "names 2 files, .*missing: model-00002-of-00002"),
    "index without a map": (
        lambda f: (f / WEIGHTS).rename(f / INDEX).write_text("{}"), "should have a 'weight_map'"),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"), "has an adapter .* which is not applied; merge it"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "encoder-decoder": (lambda f: set_config(f, is_encoder_decoder=True), "only decoder-only models"),
    "more tensors than the config can use": (
        lambda f: write_weights(f, {f"t{number}": tensor(0, 0, [0]) for number in range(5000)}),
        "has 5000 tensors; a model as config.json describes has at most 4224"),
    "two wrong sizes": (
        lambda f: set_config(f, hidden_size=0, text_config={"num_attention_heads": "x"}),
        "hidden_size is .*; num_attention_heads is"),
}  # fmt: skip
NUMBERS: dict[str, list[object]] = {
    "num_hidden_layers": [10**7, 0, -1, "2", 2.5, True],
    "num_attention_heads": [0],
    "num_key_value_heads": [0, {}],
    "hidden_size": ["abc", 1 << 40],
    "vocab_size": [-5],
    "head_dim": [0],
    "num_experts": [10**9],
}


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_is_refused_when_the_folder_is_opened(folder: Path, case: str) -> None:
    damage, sentence = FILES[case]
    damage(folder)
    assert_refused(sentence, lambda: open_checkpoint(folder))


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, own in NUMBERS.items() for each in own])
def test_an_impossible_size_is_refused(folder: Path, name: str, value: object) -> None:
    set_config(folder, **{name: value})
    assert_refused(f"{name} is .* and must be a whole number from", lambda: open_checkpoint(folder))


def test_tensors_of_a_part_that_is_not_served_are_left(folder: Path) -> None:
    add_tensor(folder, "vision_tower.embed.weight")
    assert load_model(folder).info.vocabulary_size == 97


def add_tensor(folder: Path, name: str) -> None:
    changed_tensors(folder, of(**{name: torch.ones(1)}))


def split_by(folder: Path, pattern: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = Split(Regex(pattern), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def drop_tensors(folder: Path, *names: str) -> None:
    changed_tensors(folder, lambda tensors: [tensors.pop(name) for name in names])


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
    "an unknown architecture": (
        lambda f: set_config(f, architectures=["NovelForCausalLM"], model_type="novel"), "NovelForCausalLM .*not know"),
    "missing weights": (
        lambda f: drop_tensors(f, "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"),
        "do not fit LlamaForCausalLM: missing: lm_head.weight and 1 more$"),
    "weights of another shape": (
        lambda f: set_tensor(f, "model.norm.weight", lambda t: torch.ones(33)),
        "not of the shape that config.json says: model.norm.weight$"),
    "the scale of a quantized weight": (
        lambda f: add_tensor(f, "model.layers.0.self_attn.q_proj.weight_scale"),
        "no use for: model.layers.0.self_attn.q_proj.weight_scale; quantized weights need"),
    "a regular expression that never ends": (
        lambda f: split_by(f, "(a+)+$"), "a tokenizer that cannot split a run of one character: .*retry-limit"),
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
    assert_refused(sentence, lambda: load_model(folder))


@pytest.mark.parametrize("kernels", ["off", "auto"])
async def test_a_model_with_non_finite_logits_is_refused_at_warm_up(folder: Path, kernels: str) -> None:
    set_config(folder, rms_norm_eps=-1e9)  # the root of a negative number
    model = load_model(folder, dtype="float32")
    backends = choose_backends(model, compile_mode=kernels)
    async with running(backends, refuse, max_sequences=2) as engine:
        with pytest.raises(NonFiniteLogitsError, match="its weights or its config"):
            await engine.warm_up()


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


FUZZ = settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([97, 10**7, -(10**7), 1 << 31, 1 << 63, 0.5, float("nan"), float("inf")]),
    st.sampled_from(["abc", "", [], {}, [1], [[]]]),
)
KEYS = [
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "hidden_act", "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id",
    "layer_types", "sliding_window", "attention_bias", "rms_norm_eps", "initializer_range", "dtype", "torch_dtype",
    "quantization_config", "attn_implementation", "_attn_implementation", "text_config", "auto_map", "use_cache",
    "mlp_bias", "is_encoder_decoder", "transformers_weights", "_name_or_path", "num_experts", "id2label", "num_labels",
]  # fmt: skip


@settings(FUZZ, max_examples=40)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_config_loads_or_is_refused_in_one_sentence(
    llama: TinyModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(llama.folder, tmp_path / "model", dirs_exist_ok=True))
    set_config(folder, **changes)
    try:
        load_model(folder, dtype="float32")
    except ModelFolderError as error:
        assert_one_sentence(error)


@settings(FUZZ, max_examples=80)
@given(
    name=st.sampled_from(["config.json", "generation_config.json", WEIGHTS, INDEX, "tokenizer.json"]),
    seed=st.integers(0, 1 << 32),
)
def test_any_damaged_file_loads_or_is_refused_in_one_sentence(
    llama: TinyModel, tmp_path: Path, name: str, seed: int
) -> None:
    folder = Path(shutil.copytree(llama.folder, tmp_path / "model", dirs_exist_ok=True))
    path = folder / name
    rng = random.Random(seed)
    content = bytearray(path.read_bytes() if path.exists() else b'{"weight_map": {"a": "model.safetensors"}}')
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(min(len(content), 3000) + 1) - 1
        match rng.randrange(3):
            case 0 if content:
                content[place] = rng.randrange(256)
            case 1:
                del content[place : place + rng.randrange(1, 40)]
            case _:
                content[place:place] = rng.choice([b"null", b"-1", b"[[", b"1e999", b'"', b"\xff", b"9" * 30])
    path.write_bytes(content)
    if name == INDEX:
        (folder / WEIGHTS).unlink()
    try:
        open_checkpoint(folder)
    except ModelFolderError as error:
        assert_one_sentence(error)


def test_a_missing_folder_and_a_file_in_its_place_are_refused(folder: Path) -> None:
    assert_refused("but nothing is there", lambda: open_checkpoint(folder / "nowhere"))
    assert_refused("but a file is there", lambda: open_checkpoint(folder / "config.json"))


def test_checking_a_folder_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys; from tandem.engine.models.checkpoint import open_checkpoint, tokenizer_hash; "
        f"open_checkpoint({str(folder)!r}); tokenizer_hash({str(folder)!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert run(sys.executable, "-c", program).returncode == 0


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


def test_a_sharded_checkpoint_loads(llama: TinyModel, tmp_path: Path) -> None:
    llama.reference.save_pretrained(tmp_path, max_shard_size="10KB")
    save_tokenizer(tmp_path)
    assert len(open_checkpoint(tmp_path).weights.files) > 1
    assert load_model(tmp_path, dtype="float32").info.parameter_count == llama.loaded.info.parameter_count


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
        ("Lfm2Config", {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
            "layer_types": ["conv", "full_attention", "conv"]}),
    ],
)  # fmt: skip
def test_models_with_recurrent_state_are_refused(
    tmp_path: Path, config_class: str, options: dict[str, object]
) -> None:
    config = getattr(hf, config_class)(vocab_size=97, hidden_size=16, num_hidden_layers=3, **options)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelFolderError, match="keeps recurrent state, which cannot be rolled back"):
        load_model(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="torch sees 0 CUDA devices"):
        load_model(folder, device="cuda:1")


_SHARD_BYTES = 55_000_000


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 MB of bfloat16 in four files."""
    folder = tmp_path_factory.mktemp("sharded")
    config = hf.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=_SHARD_BYTES)
    save_tokenizer(folder)
    assert len(open_checkpoint(folder).weights.files) == 4
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux to tell memory in use")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("meta", "bfloat16", marks=pytest.mark.soak),
        pytest.param("cpu", "bfloat16", marks=pytest.mark.soak),
        pytest.param("meta", "float32", marks=pytest.mark.soak),
    ],
)
def test_at_most_a_shard_is_in_memory_beside_the_model(sharded: Path, device: str, dtype: str) -> None:
    checkpoint = open_checkpoint(sharded)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would hold the model unseen
    before = _resident_bytes()
    peak = before
    ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, _resident_bytes())

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        module = loading.load_module(checkpoint, torch.device(device), getattr(torch, dtype))
    finally:
        ended.set()
        sampling.join()
    own = sum(p.numel() * p.element_size() for p in module.parameters() if p.device.type == "cpu")
    assert own * 0.9 <= peak - before <= own + 1.5 * _SHARD_BYTES


def test_every_tensor_arrives_on_the_device_itself(llama: TinyModel) -> None:
    module = loading.load_module(open_checkpoint(llama.folder), torch.device("meta"), torch.bfloat16)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert {tensor.device.type for tensor in module.buffers()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
