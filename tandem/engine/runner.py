"""Runs one step: a forward pass over packed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.engine.attention import STEP_ARGUMENT
from tandem.engine.cache import KvArena
from tandem.engine.layout import Segment, StepLayout
from tandem.engine.model import LoadedModel


class StepRunner:
    """Owns the arena and calls the model.

    This is where captured CUDA graphs come in: a graph per bucket of (sequences, width), replayed in place of the call
    of the module, with `StepLayout` filling the graph's static inputs.
    """

    def __init__(self, model: LoadedModel, total_tokens: int) -> None:
        self._module: Any = model.module
        self._model = model
        self.arena = KvArena(model.layers, total_tokens, model.dtype, model.device)

    def layout(self, segments: list[Segment]) -> StepLayout:
        """Decides the order in which the segments are packed."""
        return StepLayout(segments, self.arena, self._model.layers, self._model.dtype, self._model.device)

    def run(self, layout: StepLayout, rows: list[int]) -> Tensor:
        """One forward pass. The segments' keys and values are then in the arena.

        Args:
            layout: the step.
            rows: indices into the packed tokens at which logits are wanted, ascending or not.

        Returns:
            Logits, [len(rows), vocabulary_size] in the model's dtype.
        """
        device = self._model.device
        output = self._module(
            input_ids=torch.tensor([layout.token_ids()], device=device),
            position_ids=torch.tensor([layout.positions()], device=device),
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
            use_cache=False,
            **{STEP_ARGUMENT: layout},
        )
        logits: Tensor = output.logits[0]
        return logits
