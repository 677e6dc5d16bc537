"""One sequence as the engine knows it: token ids, and for how many of them keys and values are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from tandem.engine.interface import KvUsage
from tandem.engine.kv_cache.arena import CacheShape, PageTable, Span
from tandem.errors import InvalidRequestError
from tandem.model.types import Delta, common_length

Chain = int | str
"""Stands for the tokens of a sequence's first blocks: a number, or for no tokens the sequence's scope."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids and the state of their KV, made by `Engine.open`. Its state belongs to the engine's thread."""

    tables: SequenceOf[PageTable]
    """Pages for each group of layers, of the same capacity. The first holds pages for all tokens if any does."""
    max_length: int
    vocabulary_size: int
    spare_tokens: int = 0
    """Room that is wanted behind its end, if there is any: for branches."""
    client: str = ""
    scope: str = ""
    """Sequences of a scope reuse what each other computed (`tandem.serving.scopes`); without one it shares nothing."""
    serial: int = field(default_factory=count(1).__next__, init=False)
    """Rises with each sequence: the younger one has the higher number."""
    table: PageTable = field(init=False)
    """The first of `tables`."""
    chains: list[int] = field(default_factory=list, init=False)
    """Chains of its first blocks, which others know; see `tandem.engine.kv_cache.paged_cache`."""
    token_ids: list[int] = field(default_factory=list, init=False)
    computed_length: int = field(default=0, init=False)
    """Number of tokens, from the first on, whose keys and values are in the arena."""
    clean_length: int = field(default=0, init=False)
    """Positions below this hold numbers of this sequence or zeros, never leftovers of another."""
    is_new: bool = field(default=True, init=False)
    """No job of it has ended: what it has to compute is a prompt, however short."""
    is_released: bool = field(default=False, init=False)
    keeps_rows_apart: bool = field(default=False, init=False)
    """Rows of several tokens are wanted in a step of their own: recurrent layers can roll back to any token of that."""
    reused_length: int = field(default=0, init=False)
    """Number of tokens of its first job that others had computed."""
    preemption_count: int = field(default=0, init=False)
    """Number of times that its pages were given to others."""
    idle_since: float = field(default=math.inf, init=False)
    """When its last job ended, by `time.monotonic`; infinite while it has one."""

    def __post_init__(self) -> None:
        self.table = self.tables[0]

    @property
    def is_private(self) -> bool:
        """True if nobody else reuses what it computed, nor it what others did."""
        return not self.scope

    @property
    def last_chain(self) -> Chain:
        return self.chains[-1] if self.chains else self.scope

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def pending_count(self) -> int:
        return len(self.token_ids) - self.computed_length

    @property
    def free_places(self) -> int:
        """Number of tokens that fit behind its last one without another page."""
        return max(min(self.table.capacity, self.max_length) - self.length, 0)

    def apply(self, delta: Delta) -> None:
        """Sets ``token_ids[base_length:]`` and keeps the KV of what did not change by it, since ids are compared. A
        delta that is refused leaves the sequence as it was."""
        if not 0 <= delta.base_length <= self.length:
            raise InvalidRequestError(
                f"The delta starts at token {delta.base_length}, but the sequence has {self.length} tokens; "
                "send the missing ones from base_length 0."
            )
        self._check_fits(delta.token_ids, delta.length)
        present = self.token_ids[delta.base_length : delta.length]
        kept_length = delta.base_length + common_length(present, delta.token_ids)
        self.token_ids[delta.base_length :] = delta.token_ids
        self._roll_back(kept_length)

    def append(self, token_id: int) -> None:
        self._check_fits((token_id,), self.length + 1)
        self.token_ids.append(token_id)  # once per drafted token, hence not by way of `apply`

    def want_rows(self, row_count: int) -> None:
        """Makes sure that the last `row_count` positions will be run, again if their KV is there already."""
        if row_count > self.length:
            raise InvalidRequestError(
                f"Rows were asked for the last {row_count} positions, but the sequence has {self.length} tokens."
            )
        self._roll_back(self.length - row_count)

    def advance(self, token_count: int) -> None:
        """Records that the next `token_count` tokens' KV is in the arena."""
        self.computed_length += token_count
        self.clean_length = max(self.clean_length, self.computed_length)

    def advance_reused(self, token_count: int) -> None:
        """Records that the next `token_count` tokens' KV was in the arena already, computed for others."""
        self.advance(token_count)
        if self.is_new:
            self.reused_length += token_count

    @property
    def shortest_rollback(self) -> int:
        """The fewest computed tokens after which layers with a window still have all that the next token sees."""
        return max([table.shortest_length for table in self.tables])

    def _roll_back(self, length: int) -> None:
        if length < self.computed_length:
            self.computed_length = length if length >= self.shortest_rollback else 0

    def restart(self) -> None:
        """Forgets what was computed, since the pages were given to others."""
        self.computed_length = self.clean_length = 0
        if self.is_new:
            self.reused_length = 0
        self.chains.clear()

    def _check_fits(self, token_ids: SequenceOf[int], length: int) -> None:
        """Refuses tokens that would make it longer than it may be, and ids that do not exist."""
        if length > self.max_length:
            raise InvalidRequestError(
                f"The sequence would have {length} tokens, but its limit is {self.max_length}."
            )
        for token_id in token_ids:
            if not 0 <= token_id < self.vocabulary_size:
                raise InvalidRequestError(
                    f"Token id {token_id} is not in the vocabulary, whose ids are 0 to {self.vocabulary_size - 1}."
                )


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

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    def positions(self) -> range:
        return range(self.start, self.end)

    def span(self, group: int) -> Span:
        return self.sequence.tables[group], self.start, self.end


class SequenceCache(Protocol):
    """Gives places in the KV cache to sequences, and takes them back. Belongs to the engine's thread."""

    @property
    def shape(self) -> CacheShape: ...
    @property
    def holders(self) -> list[Sequence]:
        """Sequences that hold pages."""

    def usage(self) -> KvUsage:
        """May be called from any thread: the figures are then of about the same moment."""

    def check_rows(self, sequence: Sequence, row_count: int) -> None:
        """Refuses rows for which all pages together would not suffice, since all rows of a job are of one step."""

    def is_ready(self, sequence: Sequence, end: int) -> bool:
        """True if the tokens from the first uncomputed one up to `end` may be written at once."""

    def make_ready(self, sequence: Sequence, end: int) -> bool:
        """Gives the sequence pages of its own for its uncomputed tokens up to `end`; false if there are too few pages.
        Those that it got stay with it."""

    def take_spare(self, sequence: Sequence, count: int) -> int:
        """Takes pages that nobody holds for so many tokens behind its last one; returns for how many there is room."""

    def take_over(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Makes what lies at these positions the keys and values of the sequence's first uncomputed tokens."""

    def trim(self, sequence: Sequence) -> None:
        """Takes the pages back that lie behind the sequence's last token."""

    def reuse(self, sequence: Sequence, row_count: int = 0) -> None:
        """Lets a sequence take over what others have computed of its uncomputed tokens but the last `row_count`."""

    def after_step(self, sequence: Sequence) -> None:
        """Learns that a step of the sequence has ended."""

    def release(self, sequence: Sequence) -> None:
        """Takes all pages back. What may be of use to others is kept for as long as there is room."""

    def preempt(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence back that goes on later: its tokens are then computed again."""

    def distrust(self, sequence: Sequence) -> None:
        """Takes all pages back, and nobody reuses what is in them: the numbers are wrong."""
