"""The two models: their shapes, their folders, and text that they write themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from models.demo.recipe.corpus import VOCABULARY_SIZE, SourceFile

MAX_LENGTH = 1024
"""Longest sequence of the pair."""
END_OF_TEXT_ID = 0
"""The tokenizer's only special token."""


def target_config() -> LlamaConfig:
    """The target: 8 layers, about 9.3 million parameters."""
    return _llama(320, 864, layers=8, heads=10)


def draft_config() -> LlamaConfig:
    """The draft: a ninth of the target's size, and shallow because its latency is paid per layer."""
    return _llama(192, 384, layers=2, heads=6)


def _llama(width: int, mlp_width: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )


def load_model(folder: Path) -> LlamaForCausalLM:
    """The model of a folder, computed in float32 whatever precision its weights are stored in."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


def write_json(value: object, path: Path) -> None:
    """Write a file of figures, prompts or configuration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def packed(files: Iterable[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All files in one row of token ids, an end-of-text token after each."""
    rows = tokenizer([file.text for file in files], verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, END_OF_TEXT_ID)], dtype=torch.int32)


def windows(stream: Tensor, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows of length + 1 consecutive tokens for ever: inputs and, one position on, their labels. Every part of the
    stream is read once before any is read again."""
    while True:
        # Each pass is cut at another offset, so no two passes see the same windows.
        offset = int(torch.randint(length, (1,), generator=generator))
        count = (len(stream) - 1 - offset) // length
        for start in (offset + length * torch.randperm(count, generator=generator)).tolist():
            yield stream[start : start + length + 1].long()


@dataclass(frozen=True)
class Texts:
    """Rows of equally long texts with the target's states, in fp16 except where they were read from files or just made.

    The target's output layer makes the exact logits of `hidden`, in a sixth of their memory.
    """

    tokens: Tensor
    """[rows, length]"""
    hidden: Tensor
    """The target's final states, [rows, length, width]: `hidden[:, i]` foresees `tokens[:, i + 1]`. What was just
    written has no state of its last token."""
    mask: Tensor | None = None
    """[rows, length] Of padded texts: where `tokens` are of a text; of SmolLM2's, where `hidden` foresees one of an
    answer."""
    read: Tensor | None = None
    """States that a drafting head reads, [layers, rows, length, width]."""

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Texts]:
        for chosen in torch.split(torch.randperm(len(self.tokens), generator=generator), rows):
            read = None if self.read is None else self.read[:, chosen]
            yield Texts(self.tokens[chosen], self.hidden[chosen], read=read)


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> Texts:
    """Pad prompts on the left, and write `new_tokens` tokens after each; temperature 0 takes the most likely token."""
    generator = torch.Generator().manual_seed(seed)
    gaps = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    pairs = list(zip(prompts, gaps, strict=True))
    tokens = torch.tensor([[END_OF_TEXT_ID] * gap + list(prompt) for prompt, gap in pairs])
    mask = torch.tensor([[0] * gap + [1] * len(prompt) for prompt, gap in pairs])
    cache = DynamicCache(config=model.config)
    unread = tokens
    hidden: list[Tensor] = []
    for _ in range(new_tokens):
        states = read_states(model, unread, mask, cache)
        hidden.append(states)
        logits = model.lm_head(states[:, -1]).float()
        if temperature == 0:
            unread = logits.argmax(dim=-1, keepdim=True)
        else:
            unread = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, unread], dim=1)
        mask = torch.cat([mask, torch.ones_like(unread)], dim=1)
    return Texts(tokens, torch.cat(hidden, dim=1), mask)


def read_states(
    model: LlamaForCausalLM, unread: Tensor, mask: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """The final hidden states of the unread tokens, which end where `mask` ends."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -unread.size(1) :]
    output = model.model(
        input_ids=unread,
        # Without padding no mask is needed, and attention takes its fast causal path.
        attention_mask=None if bool(mask.all()) else mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    states: Tensor = output.last_hidden_state
    return states
