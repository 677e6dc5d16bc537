"""Shaped pairs: their size, and random weights that agree as often as asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pairs import parameters, parse_shaped
from benchmarks.shaping import ENTROPY_NATS, shaped_pair
from tandem.engine.models.checkpoint import open_checkpoint, tokenizer_hash
from tandem.errors import ConfigurationError


def test_eight_billion_parameters_are_llama_31_itself() -> None:
    shape = parse_shaped("shaped:8B:2:0.8").shape()

    assert shape == {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    assert parameters(shape) == 8_030_261_248, "what Hugging Face counts for Llama-3.1-8B"


@pytest.mark.parametrize("asked", ["1M", "5M", "25M", "200M", "1B", "3B", "70B"])
def test_a_shape_has_about_as_many_parameters_as_asked(asked: str) -> None:
    pair = parse_shaped(f"shaped:{asked}:1:0.5")
    shape = pair.shape()

    assert parameters(shape) == pytest.approx(pair.parameters, rel=0.1)
    assert shape["num_attention_heads"] * shape["head_dim"] == shape["hidden_size"]
    assert shape["num_attention_heads"] == 4 * shape["num_key_value_heads"]
    assert shape["num_hidden_layers"] >= 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("shaped:200M:1", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:lots:1:0.8", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:200M:1.5:0.8", "it must be shaped:TARGET_PARAMETERS"),
        ("shaped:200M:1:1.0", "the agreement must be between 0 and 1"),
        ("shaped:200M:1:0", "the agreement must be between 0 and 1"),
        ("shaped:10K:1:0.5", "the target must have from 500K to 100B parameters"),
    ],
)
def test_what_cannot_be_made_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--pair is '{text}'.*{complaint}"):
        parse_shaped(text)


AGREEMENT = 0.7


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shaped")


@pytest.fixture(scope="module")
def folders(cache: Path) -> tuple[Path, Path]:
    pair = shaped_pair(parse_shaped(f"shaped:1M:1:{AGREEMENT}"), "small", cache / "pair")
    return pair.target, pair.draft


def test_the_pair_as_saved_agrees_as_often_as_asked(folders: tuple[Path, Path]) -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    ids = torch.randint(0, 2048, (8, 128), generator=torch.Generator().manual_seed(99))
    with torch.inference_mode():
        of_target = target(ids).logits
        of_draft = draft(ids).logits
    agreement = (of_target.argmax(-1) == of_draft.argmax(-1)).double().mean()
    log_probs = of_target.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()

    # Other tokens than those that it was made with, and weights rounded to bf16: hence not to the last digit.
    assert agreement == pytest.approx(AGREEMENT, abs=0.06)
    assert entropy == pytest.approx(ENTROPY_NATS, abs=0.3)


def test_services_can_load_the_folders_and_every_id_has_a_word(folders: tuple[Path, Path]) -> None:
    target, draft = folders

    assert open_checkpoint(target).architecture == open_checkpoint(draft).architecture == "LlamaForCausalLM"
    assert tokenizer_hash(target) == tokenizer_hash(draft)
    config = json.loads((target / "config.json").read_text())
    assert len(AutoTokenizer.from_pretrained(target)) == config["vocab_size"]


def test_a_draft_with_all_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has 3 layers; the target has 3"):
        shaped_pair(parse_shaped("shaped:1M:3:0.5"), "small", tmp_path)
