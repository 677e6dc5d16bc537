"""Checkpoints made for tests, and reference models run by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.model.types import GenerationRequest
from tests.paths import DEMO_DRAFT

Distribution = dict[tuple[int, ...], float]
"""Probability of each sequence of tokens."""


def load_reference(folder: Path) -> Any:
    """The model in float32, as transformers runs it."""
    # Spinning threads cost far more than they gain on a busy machine.
    torch.set_num_threads(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def random_model(seed: int, **changes: object) -> Any:
    """A model of the demo draft's configuration with the given changes, and random weights."""
    config = transformers.AutoConfig.from_pretrained(DEMO_DRAFT, **changes)
    make: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make.from_config(config, dtype=torch.float32).eval()


def six_tokens(seed: int, layers: int, width: int, initializer_range: float = 0.3, **changes: object) -> Any:
    """A model of six tokens, with weights so large that some tokens are far more probable than others."""
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model(seed, vocab_size=6, initializer_range=initializer_range, **shape, **heads, **changes)


def blurred(model: Any, seed: int, scale: float) -> Any:
    """Add noise to a model's weights, relative to each tensor's own size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * scale * weights.std())
    return model


def save_model(model: Any, folder: Path) -> Path:
    """Write a checkpoint with the demo pair's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DRAFT / name, folder / name)
    return folder


class _Allowed(LogitsProcessor):
    """Leaves only these ids a probability."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self._token_ids] = scores[:, self._token_ids]
        return allowed


def exact(model: Any, request: GenerationRequest, length: int) -> Distribution:
    """The distribution of a completion's first tokens, by transformers' definition of each parameter."""
    processors: Any = LogitsProcessorList()
    if request.allowed_token_ids:
        processors.append(_Allowed(request.allowed_token_ids))
    processors.append(TemperatureLogitsWarper(request.temperature or 1.0))
    if request.top_k:
        processors.append(TopKLogitsWarper(request.top_k))
    processors.append(TopPLogitsWarper(request.top_p or 1.0))
    found: Distribution = {(): 1.0}
    for _ in range(length):
        contexts = torch.tensor([[*request.prompt, *tokens] for tokens in found])
        with torch.inference_mode():
            probs = processors(contexts, model(contexts).logits[:, -1].double()).softmax(dim=-1)
        found = {
            (*tokens, int(token_id)): mass * float(row[token_id])
            for (tokens, mass), row in zip(found.items(), probs, strict=True)
            for token_id in row.nonzero().flatten()
        }
    return found
