"""States as they are, for files: what a drafting head is to the tap, without a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.engine.models.loading import LoadedModel


class LayerStates:
    """The states of chosen layers, beside each other."""

    def __init__(self, layer_ids: Sequence[int], model: LoadedModel) -> None:
        """
        Args:
            layer_ids: residual streams by the number of layers before them.
            model: whose they are.
        """
        config = model.module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self.layer_ids = tuple(layer_ids)
        self.state_size: int = len(self.layer_ids) * config.hidden_size
        self.readers: Sequence[nn.Module] = ()

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """[tokens, state_size]

        Args:
            hidden_states: [tokens, hidden size] for each of `layer_ids`.
        """
        return torch.cat(list(hidden_states), dim=-1)
