"""A Llama model goes through GGUF and comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tandem.engine.models.checkpoint import open_checkpoint
from tandem.errors import ModelFolderError
from tandem.model_sources import gguf_llama
from tests.end_to_end.models import random_model
from tests.paths import DEMO_DRAFT

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
PARTS = {new: old for old, new in gguf_llama._LAYER_TENSORS.items()}


def write_gguf(model: Any, path: Path, **changes: str) -> None:
    """Write as llama.cpp's converter does: rows of q and k in its order, matrices as 4-bit blocks or in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer)
    for name, weights in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_tensor(name, weights.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_DRAFT / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["d e", "de f"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _tensor(name: str, weights: Any, config: Any) -> tuple[str, Any]:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return NAMES[stem] + ".weight", weights
    _, _, layer, part = stem.split(".", 3)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    if part in heads:
        halves = weights.reshape(heads[part], 2, -1, weights.shape[-1])
        weights = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
    return f"blk.{layer}.{PARTS[part]}.weight", weights


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(3)


def test_a_converted_model_has_the_same_logits(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "model.gguf")
    folder = tmp_path / "converted"
    folder.mkdir()
    gguf_llama.convert(tmp_path / "model.gguf", folder)

    open_checkpoint(folder)
    auto: Any = transformers.AutoModelForCausalLM
    converted = auto.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        difference = (converted(tokens).logits - model(tokens).logits).abs().max()
    assert difference < 5e-3 * model(tokens).logits.abs().max()

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.chat_template == TEMPLATE
    # One of its merges, each digit alone, and a special token in one piece.
    assert tokenizer.tokenize("def 12<|endoftext|>") == ["def", "Ġ", "1", "2", "<|endoftext|>"]
    assert tokenizer.decode(tokenizer("é = def")["input_ids"]) == "é = def"


def test_rows_change_places_only_within_a_head() -> None:
    rows = np.arange(2 * 6)[:, None]
    assert gguf_llama.unpermuted(rows, heads=2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_another_kind_of_model_is_refused(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "model.gguf", architecture="gemma")
    with pytest.raises(ModelFolderError, match=r"architecture and tokenizer \('gemma', 'smollm'\)"):
        gguf_llama.convert(tmp_path / "model.gguf", tmp_path)
