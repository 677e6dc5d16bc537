"""Sees to it that what the next step writes has pages, and decides who restarts when there are too few.

The older sequence goes first: it may take the pages of younger ones, the youngest first, which are computed again when
their turn comes. This is vLLM's preemption by recomputation (Kwon et al. 2023, arXiv 2309.06180, section 4.5). The
oldest one can always go on, since a sequence of the greatest length fits the arena alone. If nobody can, because
sequences without a job hold the pages, those that have had none for a while give them up, whatever their age.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment, Sequence

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""A sequence without a job for so long gives its pages to one that could not run otherwise. Between two rounds it has
none for some milliseconds."""


class PageScheduler:
    """Gives pages to the segments of a step."""

    def __init__(self, cache: PagedCache, stop_background: Callable[[Sequence], None]) -> None:
        """
        Args:
            cache: the pages.
            stop_background: ends the background work of a sequence, whose spare pages are then free.
        """
        self._cache = cache
        self._stop_background = stop_background

    def reuse_prefixes(self, jobs: Iterable[Job[Any]]) -> None:
        """Lets sequences that have much to compute take over what others have computed since."""
        for job in jobs:
            sequence = job.sequence
            if sequence.pending_count > sequence.table.page_tokens or not len(sequence.table):
                self._cache.reuse(
                    sequence, max(job.row_count, 1)
                )  # a job that has started has something to run

    def with_pages(self, segments: SequenceOf[Segment]) -> list[Segment]:
        """Those of the segments that can run now, in order; the others wait for pages."""
        if all(self._cache.is_ready(segment.sequence, segment.end) for segment in segments):
            return list(segments)
        preempted: set[Sequence] = set()
        ready: set[Sequence] = set()
        for segment in sorted(segments, key=lambda segment: segment.sequence.serial):
            if segment.sequence not in preempted and self._provide(segment, preempted):
                ready.add(segment.sequence)
        ready -= preempted
        found = [segment for segment in segments if segment.sequence in ready]
        return found or self._first_by_idle_pages([s for s in segments if s.sequence not in preempted])

    def _first_by_idle_pages(self, segments: SequenceOf[Segment]) -> list[Segment]:
        """The oldest segment, if the pages of sequences that have long been idle suffice for it."""
        if not segments:
            return []
        oldest = min(segments, key=lambda segment: segment.sequence.serial)
        latest = time.monotonic() - IDLE_SECONDS
        idle = [sequence for sequence in self._cache.holders if sequence.idle_since < latest]
        for sequence in sorted(idle, key=lambda sequence: sequence.idle_since):
            self._preempt(sequence, oldest.sequence)
            if self._cache.make_ready(oldest.sequence, oldest.end):
                return [oldest]
        return []

    def _provide(self, segment: Segment, preempted: set[Sequence]) -> bool:
        """Gives a segment its pages, if need be those of younger sequences; false if there are too few of those."""
        sequence = segment.sequence
        if self._cache.make_ready(sequence, segment.end):
            return True
        self._free_spare_pages()
        while not self._cache.make_ready(sequence, segment.end):
            youngest = max(self._cache.holders, key=lambda other: other.serial)
            if youngest.serial <= sequence.serial:
                return False
            self._preempt(youngest, sequence)
            preempted.add(youngest)
        return True

    def _preempt(self, sequence: Sequence, favoured: Sequence) -> None:
        self._stop_background(sequence)
        self._cache.preempt(sequence)
        logger.debug("sequence preempted", extra={"sequence": sequence.serial, "by": favoured.serial})

    def _free_spare_pages(self) -> None:
        for sequence in self._cache.holders:
            self._stop_background(sequence)
            self._cache.trim(sequence)
