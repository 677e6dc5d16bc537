"""Trains an EAGLE-3 head for the demo target: it foresees what the target writes from the target's hidden states.

The head learns as it will be used, on states of its own behind the first (the paper's training-time test, Li et al.
2025, arXiv 2503.01840, section 3.1). Run as `python -m models.demo.recipe.heads.eagle3 --help`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import load_model
from models.demo.recipe.corpus import load_tokenizer
from models.demo.recipe.training import (
    endless,
    kl_divergence,
    lessons_of,
    mixed_total_variation,
    train_until_over,
)
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle3 import Eagle3Head, read_eagle3_config

SEED = 11


def new_head(target_folder: Path, folder: Path, target_ids: Sequence[int] | None = None) -> Eagle3Head:
    """A head that begins as the target's last layer over the deepest of the states that it reads.

    Its config is written to the folder. It has no embedding of its own.

    Args:
        target_folder: The target's.
        folder: The head's.
        target_ids: The draft vocabulary, in ascending order; None for the target's whole one.
    """
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "rms_norm_eps", "vocab_size", "rope_parameters", "rope_theta", "max_position_embeddings")  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": target["vocab_size"] if target_ids is None else len(target_ids),
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        **{key: target[key] for key in same if key in target},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    loaded = loading.load_model(target_folder, dtype="float32")
    torch.manual_seed(SEED)
    head = Eagle3Head(read_eagle3_config(folder), loaded)
    if target_ids is not None:
        head.target_ids = torch.tensor(target_ids)
    _adopt_last_layer(head, loaded.module)
    head.embed_tokens.requires_grad_(False)
    return head


@torch.no_grad()
def _adopt_last_layer(head: Eagle3Head, target: Any) -> None:
    own, last, size = head.midlayer, target.model.layers[-1], head.state_size
    head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.target_ids])
    head.norm.weight.copy_(target.model.norm.weight)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, 2 * size :] += torch.eye(size)
    own.hidden_norm.weight.copy_(last.input_layernorm.weight)
    own.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own.self_attn, name).weight[:, size:].copy_(getattr(last.self_attn, name).weight)
    own.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    own.mlp.load_state_dict(last.mlp.state_dict())


def save(head: Eagle3Head, folder: Path) -> None:
    """Write the weights in bfloat16, without the embedding, which is the target's."""
    tensors = {
        name: each.detach().bfloat16().contiguous()
        for name, each in head.named_parameters()
        if each.requires_grad
    }
    ids: Tensor = head.target_ids  # type: ignore[assignment]  # a registered buffer
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(head.vocabulary_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    save_file(tensors, folder / "model.safetensors")


DEMO_FOLDER = Path(__file__).parents[2]
STEPS = 4
"""Tokens of a proposal when acceptance is measured."""
TRAINED_STEPS = 3
"""Tokens of a proposal that the head is trained on: each costs as much as the first."""
STEP_WEIGHT = 0.8
"""Each token counts this much of the one before it."""
ROWS_PER_BATCH = 4
MATRIX_LR, OTHER_LR = 0.02, 1e-3
TOTAL_VARIATION_FROM = 0.6

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadLessons:
    """Texts with the target's states: tokens [rows, length], read [3, rows, length, width], last [rows, length, width].

    `last` becomes the target's logits by its output layer. All states are fp16.
    """

    tokens: Tensor
    read: Tensor
    last: Tensor

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Self]:
        """All rows once, shuffled, in batches."""
        for chosen in torch.split(torch.randperm(len(self.tokens), generator=generator), rows):
            yield type(self)(self.tokens[chosen], self.read[:, chosen], self.last[chosen])


class UnrolledStep:
    """Attention of a proposal's k-th token at every position of some texts at once.

    The query at row i is that of pair i + k. It sees the pairs up to i, which have the target's states, and row i of
    the k passes after the first.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
        """See `tandem.engine.models.attention.AttentionStep`; the rows' tokens follow one another."""
        query, key, value = (self._by_row(each, query.shape[1]) for each in (query, key, value))
        self._keys.append(key)
        self._values.append(value)
        scale = query.shape[-1] ** -0.5
        past = (query @ self._keys[0].mT * scale).masked_fill(_later(query.shape[2]), -torch.inf)
        own = [(query * each).sum(-1, keepdim=True) * scale for each in self._keys[1:]]
        weights = torch.cat((past, *own), dim=-1).softmax(-1)
        output = weights[..., : past.shape[-1]] @ self._values[0]
        for index, each in enumerate(self._values[1:]):
            output = output + weights[..., past.shape[-1] + index, None] * each
        return output.transpose(1, 2).flatten(0, 1)[None]

    def _by_row(self, states: Tensor, heads: int) -> Tensor:
        """[1, heads, rows * length, dim] as [rows, heads, length, dim], with heads that share keys repeated."""
        split = states[0].view(states.shape[1], self._rows, -1, states.shape[-1]).transpose(0, 1)
        repeated: Tensor = split.repeat_interleave(heads // split.shape[1], dim=1)
        return repeated


def _later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def unrolled_states(
    head: Eagle3Head, lessons: HeadLessons, steps: int = STEPS
) -> Iterator[tuple[int, Tensor]]:
    """For each token of a proposal: its number k from 0, and the head's states [rows, bases, width] that foresee the
    token at base + k + 2, where the pairs up to the base have the target's states."""
    rows, length = lessons.tokens.shape
    bases = length - STEPS - 1
    step = UnrolledStep(rows)
    states = head.combined([each[:, :bases].flatten(0, 1).float() for each in lessons.read])
    for k in range(steps):
        tokens = lessons.tokens[:, k + 1 : k + 1 + bases].reshape(1, -1)
        positions = torch.arange(k, k + bases).repeat(rows)[None]
        hidden, states = head.advanced(tokens, positions, states, step)
        yield k, hidden.view(rows, bases, -1)


def unrolled_logits(
    head: Eagle3Head, lessons: HeadLessons, steps: int = STEPS
) -> Iterator[tuple[int, Tensor]]:
    """As `unrolled_states`, with the head's logits [rows, bases, vocabulary] in place of its states."""
    for k, hidden in unrolled_states(head, lessons, steps):
        yield k, head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def target_logits(target: LlamaForCausalLM, lessons: HeadLessons, k: int) -> Tensor:
    """The target's logits for the same tokens."""
    bases = lessons.tokens.shape[1] - STEPS - 1
    logits: Tensor = target.lm_head(lessons.last[:, k + 1 : k + 1 + bases].float())
    return logits


@torch.no_grad()
def with_states(target: LlamaForCausalLM, texts: Tensor, layer_ids: Sequence[int]) -> HeadLessons:
    """Let the target read texts of equal length, and keep the states that the head reads."""
    read, last = [], []
    for part in torch.split(texts, 16):
        output = target.model(input_ids=part, output_hidden_states=True, use_cache=False)
        read.append(torch.stack([output.hidden_states[each] for each in layer_ids]).half())
        last.append(output.last_hidden_state.half())
    return HeadLessons(texts, torch.cat(read, dim=1), torch.cat(last))


def train(head: Eagle3Head, target: LlamaForCausalLM, lessons: Sequence[HeadLessons], minutes: float) -> int:
    """Train the head in place until the time is up; returns the tokens seen."""
    batches = endless(lessons, ROWS_PER_BATCH, torch.Generator().manual_seed(SEED))

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        batch = next(batches)
        loss = _loss(head, target, batch, is_last_phase=fraction >= TOTAL_VARIATION_FROM)
        return loss, batch.tokens.numel()

    return train_until_over(head, next_loss, minutes, MATRIX_LR, OTHER_LR)


def _loss(head: Eagle3Head, target: LlamaForCausalLM, batch: HeadLessons, *, is_last_phase: bool) -> Tensor:
    compare = mixed_total_variation if is_last_phase else kl_divergence
    total = torch.zeros(())
    for k, logits in unrolled_logits(head, batch, TRAINED_STEPS):
        with torch.no_grad():
            wanted = target_logits(target, batch, k)
        total = total + STEP_WEIGHT**k * compare(wanted, logits)
    return total


@torch.no_grad()
def acceptance(
    head: Eagle3Head, target: LlamaForCausalLM, written: HeadLessons, start: int, temperature: float
) -> tuple[float, float]:
    """Accepted per drafted token, and tokens per round, on text that the target wrote from `start` on.

    As in `measure_acceptance`: a token that the target wrote was accepted with probability min(1, q / p).
    """
    wanted = written.tokens
    generator = torch.Generator().manual_seed(SEED)
    flags = []
    for k, logits in unrolled_logits(head, written):
        chosen = wanted[:, k + 2 : k + 2 + logits.shape[1]]
        if temperature == 0.0:
            flags.append(logits.argmax(-1) == chosen)
            continue
        own, others = (
            (each / temperature).log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
            for each in (logits, target_logits(target, written, k))
        )
        flags.append(torch.rand(own.shape, generator=generator) < (own - others).exp())
    accepted, rounds = 0, 0
    for row in torch.stack(flags, dim=-1).tolist():
        base = start - 2
        while base < len(row):
            run = row[base].index(False) if False in row[base] else STEPS
            accepted, rounds, base = accepted + run, rounds + 1, base + run + 1
    return accepted / (rounds * STEPS), 1 + accepted / rounds


def main() -> None:
    """Train an EAGLE-3 head for the demo target, and measure it on the held-out prompts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--output", type=Path, default=DEMO_FOLDER / "eagle3")
    parser.add_argument("--minutes-reading", type=float, default=1.0)
    parser.add_argument("--minutes-writing", type=float, default=7.0)
    parser.add_argument("--minutes-head", type=float, default=24.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    target = load_model(options.target)
    head = new_head(options.target, options.output)
    studied = lessons_of(target, options.target, options.minutes_reading, options.minutes_writing, SEED)
    lessons = [with_states(target, each.tokens, head.layer_ids) for each in studied]
    logger.info("%d tokens of lessons", sum(each.tokens.numel() for each in lessons))
    seen = train(head, target, lessons, options.minutes_head)
    save(head, options.output)
    figures = {"head_tokens_seen": seen, **measured(head, target, options.target)}
    (options.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measured(head: Eagle3Head, target: LlamaForCausalLM, folder: Path) -> dict[str, float]:
    """Acceptance on the held-out prompts of at least 20 tokens, cut there, 128 new tokens each."""
    from models.demo.recipe.architecture import continue_text

    prompts = json.loads((DEMO_FOLDER / "heldout_prompts.json").read_text(encoding="utf-8"))
    ids = load_tokenizer(folder)([each["prompt"] for each in prompts])["input_ids"]
    same_length = [each[:20] for each in ids if len(each) >= 20]
    figures: dict[str, float] = {}
    for temperature in (0.0, 0.8):
        texts = continue_text(target, same_length, 128 + STEPS, temperature, SEED).tokens
        rate, length = acceptance(head, target, with_states(target, texts, head.layer_ids), 20, temperature)
        figures |= {f"acceptance_rate_at_{temperature}": rate, f"acceptance_length_at_{temperature}": length}
        logger.info(
            "temperature %.1f: acceptance rate %.3f, %.2f tokens per round", temperature, rate, length
        )
    return figures


if __name__ == "__main__":
    main()
