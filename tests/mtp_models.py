"""Tiny targets with a layer for multi-token prediction, and what it proposes, computed by transformers' own modules.

The reference reads one sequence without a cache, and computes every pair anew for each token. Qwen3-Next itself has
recurrent layers, which no engine here runs: the one made here has attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.end_to_end.models import save_model
from tests.heads import TargetStates

LAYERS = 3
EXPERTS = 4
SIZE = 32
_APPENDED = {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
             "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1}  # fmt: skip
_SEPARATE = {"num_key_value_heads": 1, "head_dim": 16}
_EXPERTS = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_APPENDED, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
    },
    "glm4_moe": {
        **_APPENDED, "num_key_value_heads": 1, "head_dim": 16, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
    },
    "qwen3": _SEPARATE,
    "qwen3_moe": _SEPARATE | _EXPERTS,
    "qwen3_next": {
        **_SEPARATE, **_EXPERTS, "shared_expert_intermediate_size": 24,
        "layer_types": ["full_attention"] * (LAYERS + 1),
    },
}  # fmt: skip
APPENDED_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Their layer is stored behind the model's last one, as one more of them; Qwen's is stored beside the model."""
SEPARATE_FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next")
FAMILIES = (*APPENDED_FAMILIES, *SEPARATE_FAMILIES)
_BEHIND = f"model.layers.{LAYERS}."


class MtpTarget:
    """A model with random weights and its prediction layer, which is one more layer like its last one."""

    def __init__(self, family: str, vocabulary: int = 2048, size: int = SIZE, **changes: Any) -> None:
        config = transformers.AutoConfig.for_model(
            family,
            vocab_size=vocabulary,
            hidden_size=size,
            intermediate_size=48,
            num_hidden_layers=LAYERS + 1,
            num_attention_heads=2,
            max_position_embeddings=256,
            rope_theta=10000.0,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            **_SHAPES[family] | changes,
        )
        make: Any = transformers.AutoModelForCausalLM
        with torch.random.fork_rng():
            torch.manual_seed(10)
            self.model: Any = make.from_config(config, dtype=torch.float32).eval()
            decoder = self.model.model
            self._layers = decoder.layers
            self._before, self._state_norm, self._after = (
                type(decoder.norm)(size, eps=config.rms_norm_eps) for _ in range(3)
            )
            self._projection = nn.Linear(2 * size, size, bias=False)
            own = nn.ModuleList([self._layers[-1], self._before, self._state_norm, self._after])
            # Weights of norms, and the biases that choose experts; they begin as all the same.
            for name, numbers in (*own.named_parameters(), *own.named_buffers()):
                if numbers.dim() == 1 or name.endswith("e_score_correction_bias"):
                    numbers.data += 0.2 * torch.randn(numbers.shape)
        decoder.layers = self._layers[:-1]
        self.model.config.num_hidden_layers = LAYERS
        if types := getattr(config, "layer_types", None):
            self.model.config.layer_types = types[:LAYERS]
        self._is_appended = family in APPENDED_FAMILIES
        self._states = TargetStates(self.model)

    def save(self, folder: Path) -> Path:
        """Write both, by the published names."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.model.layers = self._layers
        save_model(self.model, folder)
        self.model.model.layers = self._layers[:-1]
        prefix, layer = (_BEHIND, _BEHIND) if self._is_appended else ("mtp.", "mtp.layers.0.")
        names = (
            ("enorm", "hnorm", "shared_head.norm", "eh_proj")
            if self._is_appended
            else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        )
        path = folder / "model.safetensors"
        tensors = {
            layer + name.removeprefix(_BEHIND) if name.startswith(_BEHIND) else name: each
            for name, each in load_file(path).items()
        }
        own = (self._before, self._state_norm, self._after, self._projection)
        tensors |= {
            f"{prefix}{name}.weight": module.weight.detach() for name, module in zip(names, own, strict=True)
        }
        save_file(tensors, path, metadata={"format": "pt"})
        return folder

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these, by the prediction layer."""
        decoder = self.model.model
        states = self._states.of(token_ids)[-1][None, :-1]
        tokens = list(token_ids[1:])
        for _ in range(count):
            embedded = self._before(decoder.embed_tokens(torch.tensor([tokens])))
            joined = self._projection(torch.cat((embedded, self._state_norm(states)), dim=-1))
            positions = torch.arange(len(tokens))[None]
            angles = decoder.rotary_emb(joined, position_ids=positions)
            hidden = self._layers[-1](
                joined, position_embeddings=angles, position_ids=positions, attention_mask=None
            )
            states = torch.cat((states, self._after(hidden)[:, -1:]), dim=1)
            tokens.append(int(self.model.lm_head(states[0, -1]).argmax()))
        return tokens[len(token_ids) - 1 :]
