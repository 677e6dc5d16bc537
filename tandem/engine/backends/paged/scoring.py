"""How a layer makes weights of its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Properties in which attention layers differ, beside their sizes."""

    window: int | None = None
    """Positions that a query sees, its own included; None for all."""
    scale: float | None = None
    """Factor on the scores; None for key_dim ** -0.5."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap); None leaves them."""
    sinks: Tensor | None = None
    """[heads], a score that takes part in the softmax and attends to nothing; None for none."""

    @property
    def is_usual(self) -> bool:
        """True if kernels for attention know it."""
        return self.softcap is None and self.sinks is None
