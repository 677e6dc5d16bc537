"""Checkpoints of drafting heads with random weights, and what such heads propose, computed without the engine.

The references are written from the published layouts: one sequence, no cache, everything computed anew for each token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional


class TargetStates:
    """The hidden states of a target for a text and, since attention is causal, for all its beginnings."""

    def __init__(self, target: Any) -> None:
        """Read by this model of transformers."""
        self._decoder = target.model
        self._text: tuple[int, ...] = ()
        self._states: tuple[Tensor, ...] = ()

    def of(self, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Before the first layer, after each but the last, and after the last norm; [len(token_ids), size] each."""
        if self._text[: len(token_ids)] != tuple(token_ids):
            self._text = tuple(token_ids)
            output = self._decoder(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
            self._states = tuple(states[0] for states in output.hidden_states)
        return tuple(states[: len(token_ids)] for states in self._states)


class Numbers:
    """Random tensors, by a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def plain(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> Tensor:
        numbers: Tensor = self.plain(rows, columns) / columns**0.5
        return numbers

    def norm(self, width: int) -> Tensor:
        return 1 + 0.2 * self.plain(width)

    def attention(
        self, size: int, input_size: int, heads: int, kv_heads: int, head_dim: int
    ) -> dict[str, Tensor]:
        return {
            "self_attn.q_proj.weight": self.matrix(heads * head_dim, input_size),
            "self_attn.k_proj.weight": self.matrix(kv_heads * head_dim, input_size),
            "self_attn.v_proj.weight": self.matrix(kv_heads * head_dim, input_size),
            "self_attn.o_proj.weight": self.matrix(size, heads * head_dim),
        }

    def mlp(self, size: int, width: int) -> dict[str, Tensor]:
        return {
            "mlp.gate_proj.weight": self.matrix(width, size),
            "mlp.up_proj.weight": self.matrix(width, size),
            "mlp.down_proj.weight": self.matrix(size, width),
        }

    def chosen(self, vocabulary: int, count: int) -> Tensor:
        """Distinct ids of a vocabulary."""
        return torch.randperm(vocabulary, generator=self.generator)[:count]


def saved(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


class Layers:
    """Layers over the tensors of a checkpoint, in float32: one sequence, no cache."""

    _w: dict[str, Tensor]
    _epsilon = 1e-5

    def _by(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], self._epsilon)

    def _swiglu(self, name: str, x: Tensor) -> Tensor:
        gated = functional.silu(self._by(f"{name}.gate_proj", x)) * self._by(f"{name}.up_proj", x)
        return self._by(f"{name}.down_proj", gated)


def attended(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True) -> Tensor:
    """Attention of [tokens, heads, size] each, flattened over the heads; heads of keys and values may be shared."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def angles(x: Tensor, theta: float = 10000.0, first: int = 0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the positions from `first` on, [tokens, 1, half of the size] both."""
    half = x.shape[-1] // 2
    found = torch.arange(first, first + len(x))[:, None] / theta ** (torch.arange(half) / half)
    return found.cos()[:, None], found.sin()[:, None]


def turned_halves(x: Tensor, theta: float = 10000.0, first: int = 0) -> Tensor:
    """Rotary positions, for pairs of a number of each half."""
    (cosines, sines) = angles(x, theta, first)
    (left, right) = x.chunk(2, dim=-1)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


# ---- EAGLE-3

HEADS = 2
KV_HEADS = 1
HEAD_DIM = 16
MLP = 48
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def eagle3_tensors(target: Any, draft_vocabulary: int, seed: int, **flags: bool) -> dict[str, Tensor]:
    """Random tensors by their published names, for a model of transformers."""
    size = target.config.hidden_size
    numbers = Numbers(seed)
    layer = {
        "input_layernorm.weight": numbers.norm(size),
        "hidden_norm.weight": numbers.norm(size),
        "post_attention_layernorm.weight": numbers.norm(size),
        **numbers.attention(size, 2 * size, HEADS, KV_HEADS, HEAD_DIM),
        **numbers.mlp(size, MLP),
    }
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": numbers.matrix(size, 3 * size), "norm.weight": numbers.norm(size)}
    tensors["lm_head.weight"] = numbers.matrix(draft_vocabulary, size)
    chosen = numbers.chosen(target.config.vocab_size, draft_vocabulary).sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = numbers.norm(3 * size)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": numbers.norm(size) for index in range(3)}
    return tensors


def layer_config(target: Any) -> dict[str, Any]:
    """The head's one layer as a Llama config. Its rotary base is wrong, as in published checkpoints."""
    return {
        "hidden_size": target.config.hidden_size,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 777.0,
        "vocab_size": target.config.vocab_size,
    }


def save_eagle3(
    folder: Path, target: Any, *, wrapped: bool = False, own_embedding: bool = False, draft_vocabulary: int = 96,
    seed: int = 5, layer_ids: Sequence[int] | None = None, **flags: bool,
) -> Path:  # fmt: skip
    """Write a checkpoint in the raw format, or wrapped as speculators does."""
    tensors = eagle3_tensors(target, draft_vocabulary, seed, **flags)
    if own_embedding:
        shape = (target.config.vocab_size, target.config.hidden_size)
        tensors["embed_tokens.weight"] = Numbers(seed + 1).plain(*shape)
    if wrapped:
        tensors = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    config: dict[str, Any] = {"draft_vocab_size": draft_vocabulary, **flags}
    if layer_ids is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    if wrapped:
        config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        config["transformer_layer_config"] = layer_config(target)
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer_config(target)}
    return saved(folder, config, tensors)


_OWN_NAMES = {"layers.0.": "midlayer.", "transformer.": "midlayer.", "fusion_fc.": "fc."}


class Eagle3Reference(Layers):
    """Greedy proposals of a checkpoint, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        is_wrapped = "speculators_model_type" in config
        self._flags = {
            flag: config.get(flag, flag == "norm_before_residual" and is_wrapped) for flag in FLAGS
        }
        count = target.config.num_hidden_layers
        self._layer_ids = config.get("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
        self._dim = config.get("transformer_layer_config", config.get("model", config))["head_dim"]
        self._w = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for prefix, own in _OWN_NAMES.items():
                name = name.replace(prefix, own)
            self._w[name] = tensor.float()
        own_count = len(self._w["lm_head.weight"]) if "lm_head.weight" in self._w else 0
        self._offsets = self._w.get("d2t", torch.zeros(own_count))
        """Of the target's ids of the tokens that the head knows."""
        self._theta = target.config.rope_parameters["rope_theta"]
        self._target = target
        self._states = TargetStates(target)
        self._embedding = self._w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        states = list(self._context(token_ids)[:-1])
        tokens = list(token_ids[1:])
        for _ in range(count):
            fed_back, token_id = self._next(tokens, torch.stack(states))
            states.append(fed_back)
            tokens.append(token_id)
        return tokens[len(token_ids) - 1 :]

    def _context(self, token_ids: Sequence[int]) -> Tensor:
        """The state that comes of the target's, for each token."""
        states = self._states.of(token_ids)
        return self._combined([states[index] for index in self._layer_ids])

    def _combined(self, read: list[Tensor]) -> Tensor:
        if self._flags["fc_norm"]:
            read = [self._norm(each, f"fc_norm.{index}") for index, each in enumerate(read)]
        joined = torch.cat(read, dim=-1)
        if self._flags["norm_before_fc"]:
            joined = self._norm(joined, "input_norm")
        return joined @ self._w["fc.weight"].T

    def _next(self, tokens: list[int], states: Tensor) -> tuple[Tensor, int]:
        """State to feed back and token behind the last pair."""
        normed = self._norm(states, "midlayer.hidden_norm")
        embedded = self._norm(self._embedding[torch.tensor(tokens)], "midlayer.input_layernorm")
        attended = self._attended(torch.cat((embedded, normed), dim=-1))
        state = (normed if self._flags["norm_before_residual"] else states) + attended
        inner = self._norm(state, "midlayer.post_attention_layernorm")
        state = (state + self._swiglu("midlayer.mlp", inner))[-1]
        output = self._norm(state, "norm")
        best = int((self._w["lm_head.weight"] @ output).argmax())
        return (output if self._flags["norm_output"] else state), best + int(self._offsets[best])

    def _attended(self, joined: Tensor) -> Tensor:
        query, key, value = (
            self._by(f"midlayer.self_attn.{name}_proj", joined).view(len(joined), -1, self._dim)
            for name in ("q", "k", "v")
        )
        query = turned_halves(query, self._theta)
        key = turned_halves(key, self._theta)
        return self._by("midlayer.self_attn.o_proj", attended(query, key, value))


# ---- EAGLE-1 and 2


def save_eagle(
    folder: Path,
    target: Any,
    *,
    form: str = "raw",
    bias: bool = False,
    norms: bool = False,
    embedding: str = "none",
    seed: int = 6,
) -> Path:
    """Write a checkpoint.

    Args:
        folder: where; a raw checkpoint says by the folder's name alone what it is.
        form: ``raw`` as SafeAILab publishes it, wrapped as ``vllm``'s `EAGLEConfig`, or ``speculators``.
        bias: of the first layer.
        norms: those of the speculators format's `layernorms`.
        embedding: ``none``, ``copied`` from the target, or its ``own``.
    """
    size = target.config.hidden_size
    numbers = Numbers(seed)
    tensors = _layer_tensors(target, seed)
    tensors["fc.weight"] = numbers.plain(size, 2 * size) / size**0.5
    if bias:
        tensors["fc.bias"] = numbers.plain(size)
    targets = target.get_input_embeddings().weight.detach()
    if embedding != "none":
        own = numbers.plain(*targets.shape)
        tensors["embed_tokens.weight"] = targets.clone() if embedding == "copied" else own
    if norms:
        for name in NORMS:
            tensors[name] = numbers.norm(size)
    if form == "speculators":
        tensors = {_speculators_name(name): each for name, each in tensors.items()}
    return saved(folder, _config(target, form, bias=bias, norms=norms), tensors)


def _layer_tensors(target: Any, seed: int) -> dict[str, Tensor]:
    """EAGLE-3's layer, with queries, keys and values of one state."""
    size = target.config.hidden_size
    eagle3 = eagle3_tensors(target, 4, seed)
    tensors = {
        name.replace("midlayer.", "layers.0."): each
        for name, each in eagle3.items()
        if name.startswith(("midlayer.self_attn.o", "midlayer.mlp", "midlayer.post"))
    }
    for name in ("q", "k", "v"):
        whole = eagle3[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = whole[:, :size] * 2**0.5
    return tensors


NORMS = ("embedding_layernorm.weight", "layers.0.input_layernorm.weight", "pre_lm_head_layernorm.weight")
_SPECULATORS_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


def _speculators_name(name: str) -> str:
    for prefix, other in _SPECULATORS_NAMES.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def _config(target: Any, form: str, *, bias: bool, norms: bool) -> dict[str, Any]:
    layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer_config(target)}
    if form == "speculators":
        return {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "speculators_model_type": "eagle",
            "speculators_config": {"algorithm": "eagle"},
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layer,
            "fusion_bias": bias,
            "layernorms": norms,
        }
    if form == "vllm":
        return {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": layer, "bias": bias}
    return {**layer, "bias": bias}


class EagleReference(Eagle3Reference):
    """Of EAGLE-3's reference it has the loop and the attention of a layer."""

    def _context(self, token_ids: Sequence[int]) -> Tensor:
        return self._states.of(token_ids)[-1]

    def _next(self, tokens: list[int], states: Tensor) -> tuple[Tensor, int]:
        embedded = self._normed(self._embedding[torch.tensor(tokens)], "embedding_layernorm")
        inputs = self._by("fc", torch.cat((embedded, states), dim=-1))
        state = inputs + self._attended(self._normed(inputs, "midlayer.input_layernorm"))
        inner = self._norm(state, "midlayer.post_attention_layernorm")
        foreseen = (state + self._swiglu("midlayer.mlp", inner))[-1]
        logits = self._target.lm_head(self._normed(foreseen, "pre_lm_head_layernorm"))
        return foreseen, int(logits.argmax())

    def _normed(self, states: Tensor, name: str) -> Tensor:
        """By a norm that only some checkpoints have."""
        return self._norm(states, name) if f"{name}.weight" in self._w else states


# ---- Medusa

MEDUSA_HEADS = 4


def save_medusa(
    folder: Path, target: Any, *, published: bool = False, layers: int = 1, bias: bool = False,
    draft_vocabulary: int | None = None, whole_outputs: bool = False, shared_output: bool = False, seed: int = 7,
) -> Path:  # fmt: skip
    """Write a checkpoint by FasterDecoding's names (`published`) or by those of vLLM's `MedusaModel`.

    Args:
        published: `{head}.{layer}.linear`, and no widths in the config.
        layers: residual blocks of each head.
        bias: these have biases.
        draft_vocabulary: tokens that the heads can say, with a `token_map`; None for all.
        whole_outputs: the output layers have all rows nevertheless.
        shared_output: all heads have one output layer.
    """
    size = target.config.hidden_size
    vocabulary = target.config.vocab_size
    numbers = Numbers(seed)
    rows = draft_vocabulary if draft_vocabulary is not None and not whole_outputs else vocabulary
    tensors: dict[str, Tensor] = {}
    for head in range(MEDUSA_HEADS):
        for layer in range(layers):
            name = f"{head}.{layer}.linear" if published else f"medusa_heads.blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = numbers.matrix(size, size)
            if bias:
                tensors[f"{name}.bias"] = numbers.plain(size)
        name = f"{head}.{layers}" if published else f"lm_heads.{head}"
        if head == 0 or not shared_output:
            tensors[f"{name}.weight"] = numbers.matrix(rows, size)
    config: dict[str, Any] = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": layers}
    if not published:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": size}
        config |= {"num_heads": MEDUSA_HEADS, "num_hidden_layers": layers, "vocab_size": vocabulary}
        config |= {"medusa_fc_bias": bias, "original_lm_head": shared_output}
    if draft_vocabulary is not None:
        tensors["token_map"] = numbers.chosen(vocabulary, draft_vocabulary)
        config["truncated_vocab_size"] = draft_vocabulary
    return saved(folder, config, tensors)


class MedusaReference(Layers):
    """Greedy proposals of a checkpoint, in float32: one sequence, no cache."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._layers = self._config.get("medusa_num_layers", self._config.get("num_hidden_layers"))
        stored = load_file(folder / "model.safetensors")
        self._w = {
            name.removeprefix("medusa_heads."): each if name == "token_map" else each.float()
            for name, each in stored.items()
        }
        self._states = TargetStates(target)

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these, one by each head."""
        # The state that made the target's last token; the token itself is not read.
        state = self._states.of(token_ids)[-1][-2]
        return [self._said(head, state) for head in range(count)]

    def _said(self, head: int, state: Tensor) -> int:
        for layer in range(self._layers):
            published = f"{head}.{layer}.linear"
            name = published if f"{published}.weight" in self._w else f"blocks.{head}.layers.{layer}"
            state = state + functional.silu(self._by(name, state))
        names = (f"{head}.{self._layers}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight")
        output = self._w[next(name for name in names if name in self._w)]
        known = self._w.get("token_map")
        if known is None:
            return int((output @ state).argmax())
        rows = output if len(output) == len(known) else output[known]
        return int(known[(rows @ state).argmax()])


# ---- DFlash

DFLASH_HEADS = 4
DFLASH_KV_HEADS = 2
DFLASH_MLP = 40
DFLASH_LAYERS = 2
DFLASH_THETA = 5000.0


def save_dflash(
    folder: Path, target: Any, *, block_size: int = 5, layer_ids: Sequence[int] = (1, 4), seed: int = 5,
    wrapped: bool = False, draft_vocabulary: int | None = None,
) -> Path:  # fmt: skip
    """Write a draft for a model of transformers; its mask is the vocabulary's last token.

    Args:
        block_size: tokens of a block, the last one of the text among them.
        layer_ids: layers of the target whose outputs the draft reads, counted from 0.
        wrapped: in the speculators format.
        draft_vocabulary: tokens that the draft can say, with `d2t` and an output layer of its own; only there.
    """
    size = target.config.hidden_size
    vocabulary = target.config.vocab_size
    numbers = Numbers(seed)
    tensors = _tensors(size, len(layer_ids), numbers)
    if draft_vocabulary is not None:
        chosen = numbers.chosen(vocabulary, draft_vocabulary).sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
        tensors["lm_head.weight"] = numbers.matrix(draft_vocabulary, size)
    layers = _layers_config(target)
    config: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": block_size}
    if wrapped:
        config |= {"speculators_model_type": "dflash", "transformer_layer_config": layers}
        config |= {
            "aux_hidden_state_layer_ids": [each + 1 for each in layer_ids],
            "mask_token_id": vocabulary - 1,
        }
        config |= {"draft_vocab_size": draft_vocabulary or vocabulary, "target_hidden_size": None}
        config |= {"sample_from_anchor": False, "projector_type": "dflash"}
    else:
        own = {"mask_token_id": vocabulary - 1, "target_layer_ids": list(layer_ids)}
        config |= {**layers, "dflash_config": own}
    return saved(folder, config, tensors)


def _tensors(size: int, states: int, numbers: Numbers) -> dict[str, Tensor]:
    """Random tensors of a draft that reads so many states, by their published names."""
    tensors = {"fc.weight": numbers.matrix(size, states * size)}
    tensors |= {"hidden_norm.weight": numbers.norm(size), "norm.weight": numbers.norm(size)}
    for index in range(DFLASH_LAYERS):
        layer = {
            "input_layernorm.weight": numbers.norm(size),
            "post_attention_layernorm.weight": numbers.norm(size),
            **numbers.attention(size, size, DFLASH_HEADS, DFLASH_KV_HEADS, HEAD_DIM),
            "self_attn.q_norm.weight": numbers.norm(HEAD_DIM),
            "self_attn.k_norm.weight": numbers.norm(HEAD_DIM),
            **numbers.mlp(size, DFLASH_MLP),
        }
        tensors |= {f"layers.{index}.{name}": each for name, each in layer.items()}
    return tensors


def _layers_config(target: Any) -> dict[str, Any]:
    """The draft's layers as a Qwen3 config."""
    return layer_config(target) | {
        "model_type": "qwen3",
        "intermediate_size": DFLASH_MLP,
        "num_hidden_layers": DFLASH_LAYERS,
        "num_attention_heads": DFLASH_HEADS,
        "num_key_value_heads": DFLASH_KV_HEADS,
        "rope_theta": DFLASH_THETA,
        "attention_bias": False,
        "layer_types": ["full_attention"] * DFLASH_LAYERS,
        "max_position_embeddings": target.config.max_position_embeddings,
        "num_target_layers": target.config.num_hidden_layers,
    }


class DFlashReference(Layers):
    """Greedy proposals of a draft, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._w = load_file(folder / "model.safetensors")
        self._target = target
        self._states = TargetStates(target)

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        own = self._config.get("dflash_config", self._config)
        # z-lab counts layers from 0 and means their outputs; speculators counts the layers before a state.
        numbers = own.get("aux_hidden_state_layer_ids") or [each + 1 for each in own["target_layer_ids"]]
        states = self._states.of(token_ids[:-1])
        read = [states[number] for number in numbers]
        context = self._norm(torch.cat(read, dim=-1) @ self._w["fc.weight"].T, "hidden_norm")
        ids = torch.tensor([token_ids[-1], *(own["mask_token_id"] for _ in range(count))])
        hidden = self._target.get_input_embeddings().weight[ids]
        for index in range(DFLASH_LAYERS):
            hidden = self._layer(f"layers.{index}", hidden, context)
        normed = self._norm(hidden[1:], "norm")
        if "d2t" not in self._w:
            return [int(each) for each in (normed @ self._target.get_output_embeddings().weight.T).argmax(-1)]
        best = (normed @ self._w["lm_head.weight"].T).argmax(-1)
        return [int(each) for each in best + self._w["d2t"][best]]

    def _layer(self, name: str, hidden: Tensor, context: Tensor) -> Tensor:
        inner = self._norm(hidden, f"{name}.input_layernorm")
        seen = torch.cat((context, inner))
        query, key, value = (
            self._by(f"{name}.self_attn.{part}_proj", each).view(len(each), -1, HEAD_DIM)
            for part, each in (("q", inner), ("k", seen), ("v", seen))
        )
        query = turned_halves(self._norm(query, f"{name}.self_attn.q_norm"), DFLASH_THETA, len(context))
        key = turned_halves(self._norm(key, f"{name}.self_attn.k_norm"), DFLASH_THETA)
        # Every token sees all
        hidden = hidden + self._by(f"{name}.self_attn.o_proj", attended(query, key, value, is_causal=False))
        return hidden + self._swiglu(f"{name}.mlp", self._norm(hidden, f"{name}.post_attention_layernorm"))
