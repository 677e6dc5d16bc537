"""Modules over a target's weights. They are not the target's own: whoever packs those must not change a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.models.loading import LoadedModel


def shared_embedding(target: LoadedModel) -> nn.Embedding:
    """The target's embedding."""
    module: Any = target.module
    weight: Tensor = module.get_input_embeddings().weight
    with torch.device("meta"):
        made = nn.Embedding(*weight.shape)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made


def shared_output_head(target: LoadedModel) -> nn.Linear:
    """The target's output head."""
    module: Any = target.module
    weight: Tensor = module.get_output_embeddings().weight
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
