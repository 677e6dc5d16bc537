"""The tokens that a draft's sequence extends, as far as it has to know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokens(Protocol):
    """A sequence whose tokens never change once they are there: a completion, or a row of another engine's batch."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens, the prompt included."""

    @property
    def length(self) -> int:
        """How many."""
