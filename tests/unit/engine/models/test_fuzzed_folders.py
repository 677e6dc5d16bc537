"""Randomly changed configs and damaged files: the folder loads, or is refused in one sentence."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine.models.loading import load_model
from tandem.errors import ModelFolderError
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.models.folders import INDEX, WEIGHTS, assert_one_sentence, set_config

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


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["config.json", "generation_config.json", WEIGHTS, INDEX, "tokenizer.json"]),
    seed=st.integers(0, 1 << 32),
)
def test_any_damaged_file_loads_or_is_refused_in_one_sentence(
    llama: TinyModel, tmp_path: Path, name: str, seed: int
) -> None:
    folder = Path(shutil.copytree(llama.folder, tmp_path / "model", dirs_exist_ok=True))
    path, rng = folder / name, random.Random(seed)
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
