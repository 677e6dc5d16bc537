"""How `tandem up` drafts for `smollm2`: with the head that comes with Tandem, unless another draft is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.methods import BOUND_METHODS
from tandem.model_sources.demo import smollm2_head
from tandem.model_sources.names import SMOLLM2

SMOLLM2_METHOD = "eagle3"
"""Drafting method where none is named."""
_RULE = "residual"
_RULE_VARIABLES = (
    "TANDEM_COORDINATOR_REJECTION_SAMPLING_STRATEGY",
    "TANDEM_COORDINATOR_REJECTION_SAMPLE_METHOD",
)
_RULE_OPTIONS = ("rejection_sampling_strategy", "synthetic_acceptance_rate")


def head_of(target: str | None, method: str | None, *, is_draft_in_file: bool) -> Path | None:
    """Folder of the head for a target without a named draft; None for another target or another way to draft.

    Args:
        target: As it was named.
        method: The method that was named, by its canonical name.
        is_draft_in_file: A config file names the draft.
    """
    if target != SMOLLM2 or Path(SMOLLM2).is_dir():
        return None
    if method is None:
        return None if is_draft_in_file else smollm2_head(SMOLLM2_METHOD)
    return smollm2_head(method) if method in BOUND_METHODS else None


def lossless_rule(in_file: Mapping[str, Any]) -> str | None:
    """The acceptance rule where nobody asked for a head, whose own default is lossy; None where one is named."""
    is_named = any(name in in_file for name in _RULE_OPTIONS) or any(
        name in os.environ for name in _RULE_VARIABLES
    )
    return None if is_named else _RULE
