"""Puts a loaded drafting head where its target runs."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from tandem.engine.models.loading import LoadedModel

Head = TypeVar("Head", bound=nn.Module)


def placed(head: Head, target: LoadedModel) -> Head:
    """A head on its target's device, its parameters in the target's dtype, ready to run.

    Buffers keep their dtype, which `Module.to` would change: in bfloat16 rotary frequencies have 8 significant bits,
    and positions of a few thousand tokens lose their meaning.
    """
    for parameter in head.parameters():
        parameter.data = parameter.data.to(target.device, target.dtype)
    return head.to(target.device).eval().requires_grad_(False)
