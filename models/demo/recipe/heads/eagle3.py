"""Trains an EAGLE-3 head for the demo target: it foresees what the target writes from the target's hidden states.

The head learns as it will be used, on states of its own behind the first (the paper's training-time test, Li et al.
2025, arXiv 2503.01840, section 3.1). Run as `python -m models.demo.recipe.heads.eagle3`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Texts, write_json
from models.demo.recipe.heads import Compared, make_head, save_weights
from models.demo.recipe.measure import DEMO_FOLDER, PROPOSED, options_of
from models.demo.recipe.training import Loss
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle import Eagle3Head

SEED = 11
"""The seed of the checked-in head."""


def new_head(target_folder: Path, folder: Path, target_ids: Sequence[int] | None = None) -> Eagle3Head:
    """A head that begins as the target's last layer over the deepest of the states that it reads, without an embedding
    of its own; its config is written to its folder. The draft vocabulary, `target_ids`, is ascending; None: the
    target's whole one."""
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
    write_json(config, folder / "config.json")
    loaded = loading.load_model(target_folder, dtype="float32")
    torch.manual_seed(SEED)
    head = Eagle3Head(folder)
    head.build(loaded)
    head.target_ids = torch.tensor(range(head.vocabulary_size) if target_ids is None else target_ids)
    _adopt_last_layer(head, loaded.module)
    head.embed_tokens.requires_grad_(False)
    return head


@torch.no_grad()
def _adopt_last_layer(head: Eagle3Head, target: Any) -> None:
    own: Any = head.midlayer
    last = target.model.layers[-1]
    size = head.state_size
    head.embed_tokens.weight = target.get_input_embeddings().weight
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
    """Write the weights, without the embedding, which is the target's. A head of the whole vocabulary has no table of
    ids, which vLLM would refuse."""
    ids: Tensor = head.target_ids  # type: ignore[assignment]  # a registered buffer
    if len(ids) == head.vocabulary_size:
        save_weights(head, folder)
        return
    drafted = torch.zeros(head.vocabulary_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    save_weights(head, folder, d2t=ids - torch.arange(len(ids)), t2d=drafted)


class UnrolledStep:
    """Attention of a proposal's k-th token at every position of some texts at once.

    The query at row i is that of pair i + k. It sees the pairs up to i, which have the target's states, and row i of
    the k passes after the first. Pairs in `unseen` are seen by themselves alone.
    """

    def __init__(self, rows: int, unseen: range = range(0)) -> None:
        self._rows = rows
        self._unseen = unseen
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
        """See `tandem.engine.models.attention.AttentionStep`; the rows' tokens follow one another."""
        query, key, value = (self._by_row(each, query.shape[1]) for each in (query, key, value))
        self._keys.append(key)
        self._values.append(value)
        scale = query.shape[-1] ** -0.5
        later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        later[:, self._unseen.start : self._unseen.stop] = True
        later.fill_diagonal_(False)
        past = (query @ self._keys[0].mT * scale).masked_fill(later, -torch.inf)
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


def unrolled_states(head: Eagle3Head, lessons: Texts, steps: int = PROPOSED) -> Iterator[tuple[int, Tensor]]:
    """For each token of a proposal: its number k from 0, and the head's states [rows, bases, width] that foresee the
    token at base + k + 2, where the pairs up to the base have the target's states."""
    rows, length = lessons.tokens.shape
    bases = length - PROPOSED - 1
    step = UnrolledStep(rows)
    assert lessons.read is not None
    states = head.combine([each[:, :bases].flatten(0, 1).float() for each in lessons.read])
    for k in range(steps):
        tokens = lessons.tokens[:, k + 1 : k + 1 + bases].reshape(1, -1)
        positions = torch.arange(k, k + bases).repeat(rows)[None]
        hidden, states = head.advance(tokens, positions, states, step)
        yield k, hidden.view(rows, bases, -1)


def target_logits(target: LlamaForCausalLM, lessons: Texts, k: int) -> Tensor:
    """The target's logits for the same tokens."""
    bases = lessons.tokens.shape[1] - PROPOSED - 1
    logits: Tensor = target.lm_head(lessons.hidden[:, k + 1 : k + 1 + bases].float())
    return logits


@torch.no_grad()
def with_states(target: LlamaForCausalLM, texts: Tensor, layer_ids: Sequence[int]) -> Texts:
    """Let the target read texts of equal length, and keep the states that the head reads."""
    read = []
    hidden = []
    for part in torch.split(texts, 16):
        output = target.model(input_ids=part, output_hidden_states=True, use_cache=False)
        read.append(torch.stack([output.hidden_states[each] for each in layer_ids]).half())
        hidden.append(output.last_hidden_state.half())
    return Texts(texts, torch.cat(hidden), read=torch.cat(read, dim=1))


def read_by_target(head: Eagle3Head, target: LlamaForCausalLM, lessons: Sequence[Texts]) -> list[Texts]:
    """The lessons once more, with the states that the head reads."""
    return [with_states(target, each.tokens, head.layer_ids) for each in lessons]


def losses(head: Eagle3Head, target: LlamaForCausalLM, batch: Texts, compare: Loss) -> Iterator[Tensor]:
    """Of the first tokens of a proposal alone: each costs as much as the first."""
    for k, hidden in unrolled_states(head, batch, 3):
        with torch.no_grad():
            wanted = target_logits(target, batch, k).flatten(0, 1)
        yield compare(wanted, head.logits(hidden.flatten(0, 1)))


def compared(head: Eagle3Head, target: LlamaForCausalLM, written: Texts) -> Iterator[Compared]:
    """Proposals at each place of some texts."""
    for texts in torch.split(written.tokens, 16):
        lessons = with_states(target, texts, head.layer_ids)
        parts = []
        for k, hidden in unrolled_states(head, lessons):
            own = head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
            parts.append((own, target_logits(target, lessons, k), texts[:, k + 2 : k + 2 + own.shape[1]]))
        own, wanted, chosen = (torch.stack(each, dim=2) for each in zip(*parts, strict=True))
        yield own, wanted, chosen


def main() -> None:
    """Train an EAGLE-3 head for the demo target, and measure it on the held-out prompts."""
    minutes = {"minutes_reading": 1.0, "minutes_writing": 7.0, "minutes_heads": 24.0}
    options = options_of(main.__doc__, DEMO_FOLDER / "eagle3", **minutes)
    make_head(new_head, read_by_target, losses, compared, save, options, SEED)


if __name__ == "__main__":
    main()
