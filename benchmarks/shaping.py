"""Pairs of random weights with the shape of a real model, whose draft agrees with the target as often as asked.

The shape is Llama 3.1's (8B: width 4096, MLP 3.5 times as wide, 32 layers, four query heads for each KV head), scaled.
The draft is the target's first layers, with its embedding, last norm and head. What the later layers add to the
residual stream (`o_proj`, `down_proj`) is scaled until draft and target agree on the most probable token as often as
asked: at 0 they are the same model. Random models have no use for their text, but cost and accept as real ones do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.pairs import DEMO, Pair, PairInfo, ShapedPair
from tandem.errors import ConfigurationError
from tandem_load.common import bisect

ENTROPY_NATS = 2.5
"""Entropy of the target's distribution at temperature 1, in nats; about that of a language model."""
_POSITIONS = 512
"""Random tokens on which agreement is measured: a share of 0.8 has a standard error of 0.018."""


def shaped_pair(asked: ShapedPair, name: str, folder: Path, device: str = "cpu") -> Pair:
    """The pair in the folder, made if it is not there yet."""
    shape = asked.shape()
    layers = shape["num_hidden_layers"]
    if not 1 <= asked.draft_layers < layers:
        raise ConfigurationError(
            f"the draft of the shaped pair has {asked.draft_layers} layers; the target has {layers}, "
            "and the draft must have at least 1 and fewer than that"
        )
    record = folder / "pair.json"
    if not record.is_file():
        made = _make(asked, shape, folder, device)
        record.write_text(json.dumps(made, indent=1) + "\n")
    info = PairInfo(name, **json.loads(record.read_text()))
    return Pair(folder / "target", folder / "draft", info)


def _make(asked: ShapedPair, shape: Mapping[str, Any], folder: Path, device: str) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    target = random_target(shape, torch.float32 if device == "cpu" else torch.bfloat16, device)
    draft = first_layers(target, asked.draft_layers)
    scale_later_layers(target, asked.draft_layers, scale_for(target, draft, asked.agreement))
    sharpen(target, ENTROPY_NATS)
    agreement, overlap = agreement_and_overlap(target, draft)
    made: dict[str, Any] = {"agreement": agreement, "overlap": overlap}
    for name, model in (("target", target), ("draft", draft)):
        _save(model, folder / name)
        made[f"{name}_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return made


def random_draft(folder: Path) -> Path:
    """A draft of the demo draft's shape and random weights, in this folder."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        models: Any = AutoModelForCausalLM
        models.from_config(AutoConfig.from_pretrained(DEMO / "draft")).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "draft" / name, folder / name)
    return folder


def random_target(shape: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """A model of that shape with random weights."""
    make: Any = LlamaConfig
    rope: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    config = make(**shape, **rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(1)
        model: Any = LlamaForCausalLM(config)
        model = model.to(dtype).eval().requires_grad_(False)
        # With tied embeddings a token's best successor would be itself. Signs in the last norm undo that.
        signs = torch.randint(0, 2, model.model.norm.weight.shape) * 2 - 1
        model.model.norm.weight.copy_(signs)
    return model


def first_layers(target: Any, count: int) -> Any:
    """The draft: the target's first layers, sharing its weights."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": count})
    with torch.device("meta"):
        draft: Any = LlamaForCausalLM(config)
    draft.model.layers = target.model.layers[:count]
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(draft.model, name, getattr(target.model, name))
    draft.lm_head = target.lm_head
    return draft.eval().requires_grad_(False)


def scale_for(target: Any, draft: Any, agreement: float) -> float:
    """The scale of the later layers at which the two agree that often. Leaves the target's weights as they were."""
    kept = len(draft.model.layers)
    current = 1.0

    def disagreement(scale: float) -> float:
        nonlocal current
        scale_later_layers(target, kept, scale / current)
        current = scale
        return 1.0 - agreement_and_overlap(target, draft)[0]

    found = bisect(disagreement, 1.0 - agreement, 1e-3, 4.0, within=0.01)
    scale_later_layers(target, kept, 1.0 / current)
    return found


def scale_later_layers(target: Any, kept: int, factor: float) -> None:
    """Multiply the output of the layers after the first `kept`, which they add to the residual stream."""
    for layer in target.model.layers[kept:]:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


def sharpen(model: Any, entropy_nats: float) -> None:
    """Scale the logits, by way of the last norm's weight, to a mean entropy at temperature 1."""
    logits = _logits(model)

    def certainty(scale: float) -> float:
        log_probs = torch.log_softmax(logits * scale, dim=-1)
        return float((log_probs.exp() * log_probs).sum(-1).mean())

    model.model.norm.weight.mul_(bisect(certainty, -entropy_nats, 1e-2, 1e3))


def agreement_and_overlap(target: Any, draft: Any) -> tuple[float, float]:
    """Share of positions with the same most probable token, and the probability mass that the two share."""
    of_target = _logits(target)
    of_draft = _logits(draft)
    agreement = (of_target.argmax(-1) == of_draft.argmax(-1)).double().mean()
    overlap = torch.minimum(of_target.softmax(-1), of_draft.softmax(-1)).sum(-1).double().mean()
    return float(agreement), float(overlap)


def _logits(model: Any) -> torch.Tensor:
    """Logits [_POSITIONS, vocabulary_size] along random tokens, float32."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (4, _POSITIONS // 4), generator=generator)
    with torch.inference_mode():
        logits: torch.Tensor = model(ids.to(model.model.norm.weight.device), use_cache=False).logits
    return logits.flatten(0, 1).float()


def _save(model: Any, folder: Path) -> None:
    """A checkpoint in bf16, as real ones are, with the demo pair's tokenizer and a word for each id that it lacks."""
    model.config.dtype = torch.bfloat16
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights)
    tokenizer = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"w{token_id}": token_id for token_id in range(len(vocabulary), model.config.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO / "target" / "tokenizer_config.json", folder)
