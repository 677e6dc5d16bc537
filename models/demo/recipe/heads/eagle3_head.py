"""A new EAGLE-3 head of a Llama target, and its checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.engine.models import loading
from tandem.engine.models.heads.eagle3 import Eagle3Head, read_head_config

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
    head = Eagle3Head(read_head_config(folder), loaded)
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
