"""Models of real widths and few layers, without weights."""

from __future__ import annotations

from typing import Any

import torch

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.attention import ATTENTION_NAME
from tandem.engine.models.loading import LoadedModel
from tandem.types import ModelInfo
from tests.unit.engine.fake_cuda.device import CUDA
from tests.unit.engine.tiny_models import hf

LAYERS = 2
MAX_LENGTH = 8192

_LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    "Llama-3.1-8B": lambda: hf.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        rope_parameters=dict(_LLAMA3_SCALING),
    ),
    "Mistral-7B-v0.3": lambda: hf.MistralConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768, sliding_window=None,
    ),
    "Qwen2.5-7B": lambda: hf.Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=LAYERS,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131072,
    ),
    "Qwen3-32B": lambda: hf.Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=LAYERS,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    ),
    "Mixtral-8x7B": lambda: hf.MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None,
    ),
    "Gemma-2-9B": lambda: hf.Gemma2Config(
        vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, max_position_embeddings=8192,
        query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "GPT-OSS-20B": lambda: hf.GptOssConfig(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=LAYERS,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    ),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_hidden_layers=LAYERS, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=1,
        routed_scaling_factor=2.5, max_position_embeddings=163840, rope_parameters=dict(_YARN),
    ),
}  # fmt: skip
"""The published numbers of each, but for the layers: two, of which DeepSeek's second is a mixture."""

_WINDOWS = {"Gemma-2-9B": (4096, None), "GPT-OSS-20B": (128, None)}
"""Of each layer, where some have one."""


def make_model(name: str, layers: int = LAYERS) -> LoadedModel:
    """A model on the fake device in bfloat16."""
    config = CONFIGS[name]()
    config.num_hidden_layers = layers
    with torch.device(CUDA):
        module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION_NAME)
    info = ModelInfo(name, name, config.vocab_size, "", config.max_position_embeddings, "bfloat16")
    return LoadedModel(module, info, _layers(name, config)[:layers], True, torch.bfloat16, CUDA)


def _layers(name: str, config: Any) -> tuple[LayerGeometry, ...]:
    windows = _WINDOWS.get(name, (None,) * LAYERS)
    if name == "DeepSeek-V3":
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return (LayerGeometry(config.num_attention_heads, key_dim, config.v_head_dim),) * LAYERS
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return tuple(LayerGeometry(config.num_key_value_heads, dim, dim, window) for window in windows)
