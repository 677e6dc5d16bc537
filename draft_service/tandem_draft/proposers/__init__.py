"""Drafting methods, one file each, behind one interface: open a sequence, propose from a delta, close it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from tandem.model.types import DraftOptions, Proposal, ProposeStep
from tandem.serving.model_service import ServedModel

if TYPE_CHECKING:
    from tandem_draft.proposers.ahead import Pushed
    from tandem_draft.proposers.mapping import Vocabularies


class DraftedSequence(Protocol):
    """One sequence that a method drafts for."""

    @property
    def pushed(self) -> Pushed | None:
        """Continuations drafted ahead of verifications; None for a method that never drafts ahead."""

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """Apply the step's delta and guess the tokens that follow; None for a step without an answer of its own."""


class Proposer(ServedModel, Protocol):
    """A drafting method."""

    @property
    def vocabularies(self) -> Vocabularies | None:
        """Those of targets with other tokenizers; None for a method that needs none, or cannot draft for these."""

    @property
    def is_full(self) -> bool:
        """True if a new sequence would wait for a place, unless its client has few."""

    def sequence(self, options: DraftOptions) -> AbstractAsyncContextManager[DraftedSequence]:
        """Keep a sequence for as long as the context lives."""
