"""Logits that are not finite, from which no token can be chosen.

A row is valid when its highest logit is finite. NaN anywhere makes the highest NaN; minus infinity forbids single
tokens, but not all. The check reads nothing extra from the device: it uses results that are read anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tandem.engine.core.jobs import Done, Failed, Job
from tandem.errors import NonFiniteLogitsError
from tandem.types import ModelInfo


def non_finite(length: int) -> Failed:
    """The failure of a job whose logits after `length` tokens are not finite."""
    return Failed(NonFiniteLogitsError(f"the model's logits after {length} tokens are not finite numbers"))


def finite_head(info: ModelInfo, ready: Sequence[Job[Any]], logits: Tensor) -> list[Done[None] | Failed]:
    """A head that only looks whether the rows of all jobs are good; for the start, when waiting costs nothing."""
    if bool(logits.amax(dim=-1).isfinite().all()):
        return [Done(None) for _ in ready]
    error = NonFiniteLogitsError(
        f"the model {info.name} computes logits that are not finite numbers in {info.dtype}: its weights or its "
        "config.json are damaged, or the dtype is too narrow for it"
    )
    return [Failed(error) for _ in ready]
