"""Keeps the results of branches: a sequence that goes on with one of them need not compute its tokens again."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.engine.backends.branches import SequenceBranches
from tandem.engine.kv_cache.sequence import Sequence

MAX_BYTES = 64 << 20
"""Logits of all sequences that are kept. With a vocabulary of 128k in binary32, a depth of 16 branches has 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Lead:
    """Tokens of a branch behind those that its sequence goes on with: the likeliest continuation has begun already."""

    token_ids: SequenceOf[int]
    """At least one."""
    logits: Tensor
    """Those that follow each of them, [tokens, vocabulary_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """The branch that a sequence goes on with, as far as it was computed."""

    positions: SequenceOf[int]
    """Where the keys and values of its tokens lie now, and behind them those of the lead."""
    logits: Tensor
    """Those that follow each of the sequence's tokens that the branch has, [tokens, vocabulary_size]."""
    lead: Lead | None = None
    """Tokens that the branch has behind the sequence's last one."""


@dataclass(slots=True)
class _Branches:
    """The branches of one sequence, depth by depth."""

    trunk_length: int
    """Its lead included."""
    trunk_lengths: SequenceOf[int]
    lead: Lead | None
    token_ids: list[SequenceOf[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def byte_count(self) -> int:
        return sum(each.nbytes for each in self.logits)

    def first_position(self, branch: int) -> int:
        """The position at which a branch leaves the tokens that were certain."""
        return self.trunk_lengths[branch] - len(self._led(branch))

    def path(self, branch: int) -> list[int]:
        """A branch's tokens, those of the lead included."""
        return [*self._led(branch), *(own[branch] for own in self.token_ids if branch < len(own))]

    def positions(self, branch: int, count: int) -> list[int]:
        """Where the first tokens of a branch's path lie."""
        led, width = len(self._led(branch)), len(self.trunk_lengths)
        certain, behind = self.first_position(branch), self.trunk_length + branch
        return [certain + i if i < led else behind + (i - led) * width for i in range(count)]

    def rows(self, branch: int, first: int, end: int) -> Tensor:
        """Logits that follow some tokens of a branch's path, [end - first, vocabulary_size]."""
        led = [] if self.lead is None or not self._led(branch) else [*self.lead.logits]
        own = [logits[branch] for logits in self.logits[: max(end - len(led), 0)]]
        return torch.stack([*led, *own][first:end])

    def _led(self, branch: int) -> SequenceOf[int]:
        has_lead = self.lead is not None and self.trunk_lengths[branch] == self.trunk_length
        return self.lead.token_ids if self.lead is not None and has_lead else ()


class KeptBranches:
    """The branches of sequences that have computed nothing since."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """
        Args:
            max_bytes: Logits to keep at most. Branches beyond it are computed again.
        """
        self._max_bytes = max_bytes
        self._branches: dict[Sequence, _Branches] = {}

    def add(self, part: SequenceBranches, logits: Tensor, lead: Lead | None = None) -> None:
        """Keep a step of a sequence's branches.

        Args:
            part: The step.
            logits: Those that follow each branch's token, [branches, vocabulary_size]. They are copied.
            lead: Tokens at the trunk's end that only the branches from there go on with.
        """
        sequence, step = part.sequence, part.step
        if step.depth == 0:
            self._branches[sequence] = _Branches(sequence.length, step.trunk_lengths, lead)
        kept = self._branches.get(sequence)
        if kept is None:
            return
        if logits.nbytes + sum(each.byte_count for each in self._branches.values()) > self._max_bytes:
            del self._branches[sequence]
            return
        kept.token_ids.append(step.token_ids)
        kept.logits.append(logits.clone())

    def take(self, sequence: Sequence, max_lead: int) -> Continuation | None:
        """The branch that the sequence's uncomputed tokens begin with, None for another continuation.

        The other branches are forgotten.

        Args:
            sequence: Any.
            max_lead: Tokens behind the sequence's last one that are of use.
        """
        kept = self._branches.pop(sequence, None)
        if kept is None:
            return None
        pending = sequence.token_ids[sequence.computed_length :]
        for branch in range(len(kept.trunk_lengths)):
            if kept.first_position(branch) != sequence.computed_length:
                continue
            path = kept.path(branch)
            count = _common_length(path, pending)
            if not count:
                continue
            further = path[count : count + max_lead] if count == len(pending) else []
            end = count + len(further)
            lead = Lead(further, kept.rows(branch, count, end)) if further else None
            return Continuation(kept.positions(branch, end), kept.rows(branch, 0, count), lead)
        return None

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence's branches, whose places others may write to from now on."""
        self._branches.pop(sequence, None)


def _common_length(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
