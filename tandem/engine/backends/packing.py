"""The order of a step's tokens, and the forward pass over them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.transfers import to_device
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import STEP_ARGUMENT


class Packing:
    """The tokens of a step in one row, segment after segment."""

    def __init__(self, segments: SequenceOf[Segment]) -> None:
        self.segments = segments
        """In the order in which their tokens are packed."""

    @property
    def token_count(self) -> int:
        """Number of tokens in the step."""
        return sum(segment.token_count for segment in self.segments)

    def token_ids(self) -> list[int]:
        """The step's tokens, packed."""
        return [token_id for segment in self.segments for token_id in segment.token_ids()]

    def positions(self) -> list[int]:
        """Each token's position in its sequence, packed."""
        return [position for segment in self.segments for position in range(segment.start, segment.end)]

    def packed_rows(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> list[int]:
        """Where tokens are packed that are counted in another order of the segments."""
        starts, first = {}, 0
        for segment in self.segments:
            starts[id(segment)] = first
            first += segment.token_count
        places = [
            starts[id(segment)] + offset for segment in segments for offset in range(segment.token_count)
        ]
        return [places[row] for row in rows]


def run_modules(module: Any, packing: Packing, rows: SequenceOf[int], device: torch.device) -> Tensor:
    """One forward pass by the model's own modules.

    Args:
        module: a transformers causal language model.
        packing: the step; its `attend` is the attention of every layer.
        rows: indices of the packed tokens whose logits are wanted.
        device: where the module is.

    Returns:
        Logits, [len(rows), vocabulary_size] in the dtype that the module's last layer gives.
    """
    keeps_all = list(rows) == list(range(packing.token_count))
    numbers = [np.array((packing.token_ids(), packing.positions()), dtype=np.int64)]
    packed, *kept = to_device(numbers if keeps_all else [*numbers, np.array(rows, dtype=np.int64)], device)
    output = module(
        input_ids=packed[:1],
        position_ids=packed[1:],
        # As transformers takes them; 0 stands for all in order, the usual case, and saves a gather.
        logits_to_keep=kept[0] if kept else 0,
        use_cache=False,
        **{STEP_ARGUMENT: packing},
    )
    logits: Tensor = output.logits[0]
    return logits
