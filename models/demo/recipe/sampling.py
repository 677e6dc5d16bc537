"""Text that a model writes itself, many sequences at a time, with the hidden states that produced it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from models.demo.recipe.architecture import END_OF_TEXT_ID


@dataclass(frozen=True)
class Continuation:
    """Left-padded prompts and what the model wrote after them.

    `hidden[:, i]` is the final hidden state that predicts `tokens[:, i + 1]`, so there is one fewer of them.
    The model's head turns it into the exact logits: a sixth of the memory that the logits would take.
    """

    tokens: Tensor
    mask: Tensor
    hidden: Tensor


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> Continuation:
    """Write `new_tokens` tokens after each prompt; temperature 0 takes the most likely token."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = _left_padded(prompts)
    cache = DynamicCache(config=model.config)
    unread = tokens
    hidden: list[Tensor] = []
    for _ in range(new_tokens):
        states = read_states(model, unread, mask, cache)
        hidden.append(states)
        unread = _choose(model.lm_head(states[:, -1]).float(), temperature, generator)
        tokens = torch.cat([tokens, unread], dim=1)
        mask = torch.cat([mask, torch.ones_like(unread)], dim=1)
    return Continuation(tokens, mask, torch.cat(hidden, dim=1))


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


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[END_OF_TEXT_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, mask


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
