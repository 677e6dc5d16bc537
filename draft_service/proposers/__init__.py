"""Drafting methods, one file each, behind one interface: open a sequence, propose from a delta, close it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from tandem.types import DraftOptions, ModelInfo, Proposal, ProposeStep

if TYPE_CHECKING:
    from draft_service.proposers.ahead import Pushed
    from tandem.engine.interface import KvUsage


class DraftedSequence(Protocol):
    """One sequence that a method drafts for."""

    @property
    def pushed(self) -> Pushed | None:
        """Continuations drafted ahead of verifications; None for a method that never drafts ahead."""

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """Apply the step's delta and guess the tokens that follow; None for a step without an answer of its own.

        Raises:
            InvalidRequestError: the delta does not fit the sequence or the model.
        """


class Proposer(Protocol):
    """A drafting method."""

    @property
    def model_info(self) -> ModelInfo:
        """The draft service's model, or its drafting method."""

    def kv_usage(self) -> KvUsage | None:
        """Usage of its KV cache; None when it has none. Called on the event loop."""

    @property
    def overdue_seconds(self) -> float:
        """How long it has been stuck in a step; 0 while all is well."""

    async def start(self) -> None:
        """Begin to work. Called before anything else."""

    async def close(self) -> None:
        """Let go of it."""

    def sequence(self, options: DraftOptions) -> AbstractAsyncContextManager[DraftedSequence]:
        """Keep a sequence for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
        """
