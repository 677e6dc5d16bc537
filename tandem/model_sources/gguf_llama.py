"""Conversion of a GGUF file with a Llama model into a Hugging Face folder.

The names and the order of rows are those of llama.cpp's `convert_hf_to_gguf.py`, undone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.errors import ModelFolderError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert(source: Path, folder: Path) -> None:
    """Write config, float16 weights, tokenizer and chat template of the model in `source` into `folder`.

    Raises:
        ModelFolderError: the file does not hold a Llama model with the tokenizer of the SmolLM family.
    """
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    found = (facts.get("general.architecture"), facts.get("tokenizer.ggml.pre"))
    if found != ("llama", "smollm"):
        raise ModelFolderError(
            f"the file {source} holds a model of architecture and tokenizer {found}; only ('llama', 'smollm') is known"
        )
    names = {tensor.name for tensor in reader.tensors}
    config = _config(facts, is_tied="output.weight" not in names)
    save_file(dict(_weights(reader, config)), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(facts).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts, config["max_position_embeddings"]))
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", config)


def _config(facts: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "float16",
    }


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float16]]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        _, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part in heads:
            values = unpermuted(values, heads[part])
        yield _hugging_face_name(tensor.name), np.ascontiguousarray(values, dtype=np.float16)


def _hugging_face_name(name: str) -> str:
    if name in _OTHER_TENSORS:
        return _OTHER_TENSORS[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"


def unpermuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """The rows of a query or key matrix in Hugging Face's order.

    llama.cpp rotates neighbouring pairs of a head's dimensions, Hugging Face its first half with its second.

    Args:
        rows: [heads * head_dim, hidden_size], any dtype.
        heads: How many heads the rows belong to.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What llama.cpp calls "smollm": every digit is a token of its own, then GPT-2's byte-level splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(facts: dict[str, Any], max_length: int) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    special = {
        name: tokens[facts[f"tokenizer.ggml.{kind}_token_id"]] for name, kind in _SPECIAL_TOKENS.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
