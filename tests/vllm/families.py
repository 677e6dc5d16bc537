"""Tiny random checkpoints that vLLM's CPU kernels take: their heads have at least 32 numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.engine.tiny_models import MAX_LENGTH, VOCABULARY_SIZE, WINDOW, hf

_SHAPE = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MAX_LENGTH, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **changes: hf.LlamaConfig(**_SHAPE | changes),
    "mistral": lambda: hf.MistralConfig(**_SHAPE, sliding_window=WINDOW, head_dim=32),
    "qwen3": lambda: hf.Qwen3Config(**_SHAPE, head_dim=32),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=4, head_dim=32),
    "mixtral": lambda: hf.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_SHAPE | {"num_hidden_layers": 3}, head_dim=32, sliding_window=WINDOW, sliding_window_pattern=3,
        tie_word_embeddings=True,
    ),
    "phi3": lambda: hf.Phi3Config(**_SHAPE),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=WINDOW
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_SHAPE | _EXPERTS | {"num_key_value_heads": 2}, n_routed_experts=4, scoring_func="sigmoid",
        topk_method="noaux_tc", n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=32,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
    "olmo2": lambda: hf.Olmo2Config(**_SHAPE),
    "granite": lambda: hf.GraniteConfig(**_SHAPE),
    "smollm3": lambda: hf.SmolLM3Config(**_SHAPE),
    "qwen2": lambda: hf.Qwen2Config(**_SHAPE),
}  # fmt: skip
"""Configuration makers by family. Windows are shorter than the texts of the tests."""

VISION: dict[str, Callable[..., Any]] = {
    "gemma3_vision": lambda: hf.Gemma3Config(
        text_config=_SHAPE | {
            "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 3,
        },
        vision_config={**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        image_token_index=98, boi_token_index=97, eoi_token_index=96, mm_tokens_per_image=4,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=_SHAPE | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        vision_config={**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
}  # fmt: skip
"""The same with a vision tower, which text does not need; vLLM imports torchvision for these."""

_GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}  # fmt: skip

RECURRENT: dict[str, Callable[..., Any]] = {
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_SHAPE | {"num_hidden_layers": 3}, **_EXPERTS, **_GATED, num_experts=4, head_dim=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **_SHAPE | {"num_hidden_layers": 3}, **_MAMBA, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=96, mamba_expand=2, position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba"],
    ),
}  # fmt: skip
"""Hybrids of attention and recurrent layers: one with gated delta nets, one with Mamba 2."""
