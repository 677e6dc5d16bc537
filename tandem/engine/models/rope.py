"""Fixes rotary frequencies that would depend on the longest sequence of a batch.

transformers chooses the frequencies of the types below from the greatest position in a forward pass. When sequences
share a pass, another sequence would then change a sequence's results, and new entries of the KV cache would not match
old ones. So the frequencies are chosen once, for the longest sequence that the engine serves.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_FIXED = "fixed"
"""Put in place of the type's name: transformers updates only the types that it knows to vary."""


def fix_rotary_frequencies(model: nn.Module, max_length: int, device: torch.device) -> None:
    """Makes every rotary embedding of the model use the frequencies of a sequence of `max_length` tokens."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _varies(rope_type):
            _evaluate_at(module, max_length, device)
            module.rope_type = _FIXED  # type: ignore[assignment]  # a plain attribute, not a submodule
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, name in rope_type.items() if _varies(name)]:
                _evaluate_at(module, max_length, device, layer_type=layer_type)
                rope_type[layer_type] = _FIXED


def _varies(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _evaluate_at(module: Any, max_length: int, device: torch.device, **layer: str) -> None:
    """Runs the embedding at the last position, which makes it choose the frequencies of that length."""
    with (
        torch.no_grad()
    ):  # not inference mode: the module keeps the frequencies, and others may train or export it
        module(torch.zeros(1, device=device), torch.tensor([[max_length - 1]], device=device), **layer)
    logger.warning(
        "rotary frequencies are fixed for the longest sequence; a lower max_length may suit short texts better",
        extra={"max_length": max_length, **layer},
    )
