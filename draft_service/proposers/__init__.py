"""Drafting methods, one file each, behind one interface: open a sequence, propose from a delta, close it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from tandem.types import DraftOptions, ModelInfo, Proposal, ProposeStep

if TYPE_CHECKING:
    from tandem.engine.cache import KvUsage


class DraftedSequence(Protocol):
    """One sequence that a method drafts for."""

    async def propose(self, step: ProposeStep) -> Proposal:
        """Apply the step's delta and guess the tokens that follow.

        Raises:
            InvalidRequestError: the delta does not fit the sequence or the model.
        """


class Proposer(Protocol):
    """A drafting method."""

    @property
    def model_info(self) -> ModelInfo:
        """What it drafts with."""

    def kv_usage(self) -> KvUsage | None:
        """What its KV cache holds; None when it has none. Called on the event loop."""

    async def start(self) -> None:
        """Begin to work. Called before anything else."""

    async def close(self) -> None:
        """Let go of it."""

    def sequence(self, options: DraftOptions) -> AbstractAsyncContextManager[DraftedSequence]:
        """Keep a sequence for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
        """
