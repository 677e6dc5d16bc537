"""Models of random weights with the shape of Llama 3, made on the device itself: nothing is written to a disk."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import tandem
from tandem.engine.models.attention import probe
from tandem.engine.models.loading import LoadedModel
from tandem.types import ModelInfo

hf: Any = transformers  # its configurations take what they like

SHAPES: dict[str, dict[str, int]] = {
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096,
    },
}  # fmt: skip
"""Llama 3.1 8B, Llama 3.2 1B, and one for a rehearsal on a CPU."""


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of one of the shapes, ready to run."""
    config: Any = hf.LlamaConfig(**SHAPES[name], tie_word_embeddings=name == "1B")
    torch.manual_seed(0)
    with torch.device(device):
        module: Any = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    module = module.eval().requires_grad_(False)
    anatomy = probe(module, device)
    info = ModelInfo(
        name=f"random-{name}",
        architecture=type(module).__name__,
        vocabulary_size=config.vocab_size,
        tokenizer_hash="",
        max_length=config.max_position_embeddings,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=(),
        service_version=tandem.__version__,
        parameter_count=sum(parameter.numel() for parameter in module.parameters()),
    )
    return LoadedModel(module, info, anatomy.layers, anatomy.is_packed, dtype, device)
