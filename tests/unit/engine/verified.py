from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine import rows
from tandem.engine.interface import RowRequest
from tandem.model.types import Verification
from tests.paths import DEVICE


def verifications(requests: Sequence[RowRequest], logits: torch.Tensor) -> list[Verification | None]:
    """As the engine computes them, on the device of the tests."""
    return rows.verifications(requests, logits.to(DEVICE, copy=True))


def verified(requests: Sequence[RowRequest], logits: torch.Tensor) -> list[Verification]:
    """The rows of requests whose logits are numbers."""
    found = [each for each in verifications(requests, logits) if each]
    assert len(found) == len(requests)
    return found
