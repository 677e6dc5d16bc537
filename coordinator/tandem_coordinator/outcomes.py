"""The outcome of a round, as a draft that works ahead was prepared for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tandem.model.types import Proposal, StepCost


@dataclass(frozen=True, slots=True)
class Hit:
    """The draft has drafted ahead of the outcome that came, and is done with it."""

    proposal: Proposal
    rank: int
    """Place of the outcome among those that it drafted for, from 0 on."""
    step: StepCost | None = None
    """The last step for its outcomes; None if it has not told."""


@dataclass(frozen=True, slots=True)
class Coming:
    """The draft has drafted ahead of the outcome that came, and is still at it."""

    proposal: Proposal
    """As far as it is there."""
    rank: int
    max_tokens: int
    """Tokens that it will have."""
    due_seconds: float
    """Seconds until its next token is expected."""
    step_seconds: float
    """Seconds from one token to the next."""
    step: StepCost | None = None
    """As for a hit."""

    @property
    def ready(self) -> int:
        """Tokens that are there."""
        return len(self.proposal)

    def seconds(self, count: int) -> float:
        """Seconds until so many of its tokens are expected."""
        missing = count - self.ready
        return self.due_seconds + (missing - 1) * self.step_seconds if missing > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Miss:
    """Another outcome came than those that the draft has drafted for."""

    step: StepCost | None = None
    """As for a hit."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The draft works ahead of nothing: it waits to be asked."""


@dataclass(frozen=True, slots=True)
class Away:
    """There is no draft to ask now: none is ready, or the one that is begins to read the sequence."""


Outcome: TypeAlias = Hit | Coming | Miss | Idle

IDLE = Idle()
AWAY = Away()
