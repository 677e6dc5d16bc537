"""Tiny targets with a layer for multi-token prediction, and what such a layer proposes, computed independently.

The reference is written from DeepSeek-V3's and GLM-4.5's published layouts: one sequence, no cache, every pair computed
anew for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.end_to_end.models import save_model
from tests.head_tensors import Layers, angles, attended, turned_halves

FAMILIES = ("deepseek_v3", "glm4_moe")
LAYERS, EXPERTS = 3, 4
PREFIX = f"model.layers.{LAYERS}."

_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
    },
    "glm4_moe": {"num_key_value_heads": 1, "head_dim": 16, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
}  # fmt: skip


def mtp_target(family: str, vocabulary: int = 2048) -> Any:
    """A target with experts, without its prediction layer."""
    return random_target(
        family,
        vocabulary,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=1,
        **_SHAPES[family],
    )


def random_target(family: str, vocabulary: int, **shape: Any) -> Any:
    """A model of transformers with random weights, without the prediction layer, which transformers does not build."""
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_theta=10000.0,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        **shape,
    )
    make: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make.from_config(config, dtype=torch.float32).eval()


def save_mtp(model: Any, folder: Path, seed: int = 5) -> Path:
    """Write the target with a prediction layer of random weights, by the published names."""
    norms = ("enorm", "hnorm", "shared_head.norm")
    return save_with_layer(model, folder, PREFIX, norms, "eh_proj", seed)


def save_with_layer(
    model: Any, folder: Path, prefix: str, norms: Sequence[str], projection: str, seed: int, *,
    layer: str = "", centre: float = 1.0,
) -> Path:  # fmt: skip
    """Write the target with one more layer like its last one, of random weights.

    Args:
        model: the target, of transformers.
        folder: where.
        prefix: of all names.
        norms: names of the norms beside the layer's own.
        projection: name of the matrix that joins an embedding and a state.
        seed: of the weights.
        layer: prefix of the layer's own names.
        centre: mean weight of a norm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    like = f"model.layers.{LAYERS - 1}."
    shapes = {
        layer + name.removeprefix(like): each.shape for name, each in tensors.items() if name.startswith(like)
    }
    size = model.config.hidden_size
    shapes |= {f"{name}.weight": torch.Size([size]) for name in norms}
    shapes[f"{projection}.weight"] = torch.Size([size, 2 * size])
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "bias" not in name
        tensors[prefix + name] = centre + 0.2 * numbers if is_norm else numbers * shape[-1] ** -0.5
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class MtpReference(Layers):
    """Greedy proposals of the prediction layer in a checkpoint, in float32."""

    def __init__(self, folder: Path, target: Any, prefix: str = PREFIX) -> None:
        tensors = load_file(folder / "model.safetensors")
        self._w = {
            name.removeprefix(prefix): each.float()
            for name, each in tensors.items()
            if name.startswith(prefix)
        }
        self._target, self._config = target, target.config
        self._embedding, self._head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        output = self._target(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
        states = list(output.hidden_states[-1][0, :-1])  # after the last norm
        tokens = list(token_ids[1:])
        for _ in range(count):
            state = self._layer(self._embedding[torch.tensor(tokens)], torch.stack(states))[-1]
            tokens.append(int((self._head @ state).argmax()))
            states.append(state)
        return tokens[len(token_ids) - 1 :]

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat((self._norm(embedded, "enorm"), self._norm(states, "hnorm")), dim=-1)
        hidden = joined @ self._w["eh_proj.weight"].T
        attend = self._latent if self._config.model_type == "deepseek_v3" else self._grouped
        hidden = hidden + attend(self._norm(hidden, "input_layernorm"))
        hidden = hidden + self._experts(self._norm(hidden, "post_attention_layernorm"))
        return self._norm(hidden, "shared_head.norm")

    def _latent(self, x: Tensor) -> Tensor:
        """DeepSeek-V2's multi-head latent attention; rotary pairs are neighbours."""
        config, length = self._config, len(x)
        plain, turned, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        query = self._by(
            "self_attn.q_b_proj", self._norm(self._by("self_attn.q_a_proj", x), "self_attn.q_a_layernorm")
        )
        query = query.view(length, -1, plain + turned)
        latent, shared_key = torch.split(
            self._by("self_attn.kv_a_proj_with_mqa", x), [config.kv_lora_rank, turned], dim=-1
        )
        both = self._by("self_attn.kv_b_proj", self._norm(latent, "self_attn.kv_a_layernorm"))
        key, value = torch.split(both.view(length, -1, plain + values), [plain, values], dim=-1)
        query = torch.cat((query[..., :plain], _turned_neighbours(query[..., plain:])), dim=-1)
        rotary = _turned_neighbours(shared_key[:, None]).expand(-1, key.shape[1], -1)
        return self._by("self_attn.o_proj", attended(query, torch.cat((key, rotary), dim=-1), value))

    def _grouped(self, x: Tensor) -> Tensor:
        """GLM-4.5's attention; half of each head is rotated, by halves."""
        size = self._config.head_dim
        query, key, value = (
            self._by(f"self_attn.{name}_proj", x).view(len(x), -1, size) for name in ("q", "k", "v")
        )
        query, key = self._norm(query, "self_attn.q_norm"), self._norm(key, "self_attn.k_norm")
        query, key = (
            torch.cat((turned_halves(each[..., : size // 2]), each[..., size // 2 :]), dim=-1)
            for each in (query, key)
        )
        return self._by("self_attn.o_proj", attended(query, key, value))

    def _experts(self, x: Tensor) -> Tensor:
        """DeepSeek-V3's experts: the bias chooses groups and experts, and has no part in their weights."""
        config, output = self._config, self._swiglu("mlp.shared_experts", x)
        scores = (x @ self._w["mlp.gate.weight"].T).sigmoid()
        biased = scores + self._w["mlp.gate.e_score_correction_bias"]
        for row in range(len(x)):
            groups = biased[row].view(config.n_group, -1)
            kept = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group).indices
            allowed = torch.full_like(groups, -torch.inf)
            allowed[kept] = groups[kept]
            chosen = allowed.flatten().topk(config.num_experts_per_tok).indices
            weights = scores[row, chosen] / scores[row, chosen].sum() * config.routed_scaling_factor
            for expert, weight in zip(chosen.tolist(), weights, strict=True):
                output[row] += weight * self._swiglu(f"mlp.experts.{expert}", x[row])
        return output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = 1e-6 if name.endswith("_a_layernorm") else self._config.rms_norm_eps
        return functional.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], epsilon)


def _turned_neighbours(x: Tensor) -> Tensor:
    (cosines, sines), first, second = angles(x), x[..., ::2], x[..., 1::2]
    return torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-1).flatten(
        -2
    )
