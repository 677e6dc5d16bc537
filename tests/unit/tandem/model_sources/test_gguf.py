"""A Llama model goes through GGUF and comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tandem.engine.models.checkpoint import open_checkpoint
from tandem.model_sources.find import convert
from tests.end_to_end.models import random_model
from tests.paths import DEMO_DRAFT

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(model: Any, path: Path) -> None:
    """Write as llama.cpp's converter does: the rows of q and k have its order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
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


def test_a_converted_model_has_the_same_logits_and_tokens(tmp_path: Path) -> None:
    model = random_model(3)
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(weights.half())
    write_gguf(model, tmp_path / "model.gguf")
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {0o644}, "a container's user is another one"

    checkpoint = open_checkpoint(folder)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.eos_token_ids == (0,)
    assert checkpoint.config["rms_norm_eps"] == 1e-6
    own = model.state_dict()
    stored = load_file(folder / "model.safetensors")
    assert own.keys() - stored.keys() == {"lm_head.weight"}, "tied to the embedding"
    assert all(torch.equal(own[name], each.float()) for name, each in stored.items())

    auto: Any = transformers.AutoModelForCausalLM
    converted = auto.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(converted(tokens).logits, model(tokens).logits)

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.chat_template == TEMPLATE
    # One of its merges, each digit alone, and a special token in one piece.
    assert tokenizer.tokenize("def 12<|endoftext|>") == ["def", "Ġ", "1", "2", "<|endoftext|>"]
    assert tokenizer.decode(tokenizer("é = def")["input_ids"]) == "é = def"
