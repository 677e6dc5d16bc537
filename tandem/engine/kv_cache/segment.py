"""The part of a sequence that one step runs."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.kv_cache.sequence import Sequence


@dataclass(slots=True)
class Segment:
    """Consecutive tokens of one sequence in a step."""

    sequence: Sequence
    token_count: int

    @property
    def start(self) -> int:
        """Position of the first token; everything before it is in the arena."""
        return self.sequence.computed_length

    @property
    def end(self) -> int:
        """Length of the sequence's KV after the step."""
        return self.sequence.computed_length + self.token_count

    def token_ids(self) -> list[int]:
        """The tokens themselves."""
        return self.sequence.token_ids[self.start : self.end]
