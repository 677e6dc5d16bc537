from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.interface import RowRequest
from tandem.engine.rows import TORCH_SAMPLER, verifications
from tandem.types import Verification


def verified(requests: Sequence[RowRequest], logits: torch.Tensor) -> list[Verification]:
    """The rows of requests whose logits are numbers."""
    found = [each for each in verifications(requests, logits.clone(), TORCH_SAMPLER) if each]
    assert len(found) == len(requests)
    return found
