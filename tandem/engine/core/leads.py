"""Sequences that go on by themselves: an answered job may be followed by jobs that nobody has asked for yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Sequence


@dataclass(slots=True)
class _Lead:
    """Jobs of one sequence by number: 0 is the one that was submitted."""

    allowed: int
    """The last that may begin."""
    asked: int = 0
    """The last that somebody waits for, or waited for."""
    begun: int = 0
    """The last that has begun."""
    number: int = 0
    job: Job[Any] | None = None
    """The job of that number, the latest: it runs, has run, or waits until it may."""


class Leads:
    """The leads of all sequences. Every method is called on the engine's thread."""

    def __init__(self) -> None:
        self._leads: dict[Sequence, _Lead] = {}
        self.begun_count = 0
        """Jobs that have begun by themselves."""
        self.wasted_count = 0
        """Those of them that nobody asked for until their lead ended."""

    def follow(self, job: Job[Any], following: Job[Any]) -> Job[Any] | None:
        """Let one job follow another that was answered; returns it if it may begin."""
        sequence = job.sequence
        if sequence not in self._leads:
            self._leads[sequence] = _Lead(allowed=job.lead)
        lead = self._leads[sequence]
        lead.job = following
        lead.number += 1
        return self._next(lead)

    def grant(self, sequence: Sequence, asked: int, count: int) -> Job[Any] | None:
        """The job of that number was asked for, and so many may begin behind it; returns the one that may now."""
        lead = self._leads.get(sequence)
        if lead is None:
            return None
        lead.asked, lead.allowed = asked, asked + count
        return self._next(lead)

    def end(self, sequence: Sequence) -> bool:
        """End a sequence's lead; false if it has none. Its job, if one runs, is of no use."""
        lead = self._leads.pop(sequence, None)
        if lead is not None:
            self.wasted_count += max(lead.begun - lead.asked, 0)
        return lead is not None

    def is_ahead(self, sequence: Sequence) -> bool:
        """True if nobody waits for the sequence's job yet."""
        lead = self._leads.get(sequence)
        return lead is not None and lead.begun > lead.asked

    def _next(self, lead: _Lead) -> Job[Any] | None:
        if lead.begun == lead.number or lead.number > lead.allowed:
            return None
        lead.begun = lead.number
        self.begun_count += 1
        return lead.job
