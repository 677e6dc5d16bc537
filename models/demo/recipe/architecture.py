"""The shapes of the two models, and how one becomes a standard Hugging Face folder."""

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.demo.recipe.tokenizer import VOCABULARY_SIZE

MAX_LENGTH = 1024
END_OF_TEXT_ID = 0


def target_config() -> LlamaConfig:
    """The target: 8 layers, about 9.3 million parameters."""
    return _llama(hidden_size=320, intermediate_size=864, layers=8, heads=10, key_value_heads=2)


def draft_config() -> LlamaConfig:
    """The draft: a ninth of the target's size, and shallow because its latency is paid per layer."""
    return _llama(hidden_size=192, intermediate_size=384, layers=2, heads=6, key_value_heads=2)


def build_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A model with fresh random weights in fp32."""
    return LlamaForCausalLM(config)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model of a folder, computed in `dtype` whatever precision its weights are stored in."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train(False)
    return model


def save_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 weights, configuration and tokenizer; the folder appears whole or not at all."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shipped = LlamaForCausalLM(model.config).bfloat16()
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    shipped.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _llama(
    *, hidden_size: int, intermediate_size: int, layers: int, heads: int, key_value_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
