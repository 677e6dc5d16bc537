from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.interface import RowRequest
from tandem.engine.rows import TORCH_SAMPLER, Sampler, verifications
from tandem.types import Verification


def verified(
    requests: Sequence[RowRequest], logits: torch.Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Verification]:
    """The rows of requests whose logits are numbers."""
    found = [
        verification for verification in verifications(requests, logits.clone(), sampler) if verification
    ]
    assert len(found) == len(requests)
    return found
