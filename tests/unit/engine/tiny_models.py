"""Checkpoints of every architecture that users bring, small enough to make in a test and with numbers worth comparing.

Random weights of the usual scale give logits so flat that rounding decides the greatest; these are scaled up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

hf: Any = transformers  # its configurations take what they like

VOCABULARY_SIZE = 97
MAX_LENGTH = 192
WINDOW = 16

_SHAPE = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": MAX_LENGTH, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {
    "vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH,
    "initializer_range": 0.3,
}  # fmt: skip
_FALCON = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.3,
}  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=44),  # no whole number of vectors
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, num_experts=4, head_dim=8),
    "mixtral": lambda: hf.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=5.0,
        tie_word_embeddings=False,  # tied and scaled as Gemma's are, random embeddings make it repeat itself
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_GROUPED | {"num_hidden_layers": 3}, head_dim=8, sliding_window=WINDOW, sliding_window_pattern=3,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, sliding_window=WINDOW),
    "gpt2": lambda: hf.GPT2Config(**_GPT),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SHAPE),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH, word_embed_proj_dim=32, init_std=0.3,
    ),
    "falcon": lambda: hf.FalconConfig(**_FALCON, multi_query=True),
    "falcon_alibi": lambda: hf.FalconConfig(**_FALCON, alibi=True, multi_query=False, parallel_attn=False),
    "starcoder2": lambda: hf.Starcoder2Config(**_GROUPED, sliding_window=WINDOW),
    "cohere": lambda: hf.CohereConfig(**_GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=WINDOW
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_SHAPE, **_EXPERTS, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "gptj": lambda: hf.GPTJConfig(**_GPT, rotary_dim=8),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=32, n_layer=2, n_head=4, seq_length=MAX_LENGTH, initializer_range=0.3
    ),
}  # fmt: skip
"""Configuration makers by family. Windows are shorter than the texts of the tests."""


def save_checkpoint(folder: Path, config: Any) -> Any:
    """Writes a checkpoint of random weights and a tokenizer to go with it; returns the model, for reference."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    # Older transformers choose SDPA for Gemma-2, which drops its soft-capping without a word.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    maker = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases, norms and sinks start as constants, which would hide their misuse.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "norm" in name or not parameter.std() > 0:
                parameter.normal_(std=0.3)
    torch.random.set_rng_state(generator_state)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer.json with as many words."""
    vocabulary = {f"w{index}": index for index in range(VOCABULARY_SIZE)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
