"""The work that an engine does for one sequence while nobody waits for it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tandem.engine.backends.branches import BranchStep
from tandem.engine.core.background.kept_branches import Lead
from tandem.engine.core.events import StepRecord
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import TandemError
from tandem.types import Delta


class BackgroundJob(Protocol):
    """Branches of one sequence. Every method is called on the engine's thread."""

    @property
    def sequence(self) -> Sequence:
        """The sequence."""

    @property
    def delta(self) -> Delta:
        """Makes the sequence the trunk. It is applied in any case, also when the work is never begun."""

    @property
    def row_count(self) -> int:
        """Number of the trunk's last positions whose logits decide where it branches."""

    @property
    def max_lead(self) -> int:
        """Number of tokens behind the trunk that are of use if a branch of the sequence's last job has them."""

    def begin(self, logits: Tensor, room: int, lead: Lead | None) -> BranchStep | None:
        """Choose the branches.

        Args:
            logits: [row_count, vocabulary_size] of the trunk's last positions.
            room: Tokens that fit behind the trunk and the lead.
            lead: Tokens behind the trunk that are in the cache; a branch may go on behind them.

        Returns:
            The first step; None for no branches.
        """

    def advance(self, logits: Tensor) -> BranchStep | None:
        """Take the logits that follow each branch, [branches, vocabulary_size], and return what to run next."""

    def count_step(self, record: StepRecord) -> None:
        """A step of branches has ended, with what `advance` made of it."""

    def fail(self, error: TandemError) -> None:
        """It ends with an error."""
