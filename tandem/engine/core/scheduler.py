"""Which tokens go into the next step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.segment import Segment

_SHORT_TOKENS = 32
"""Work of at most this many tokens (a draft step, a verify block) never waits for a prompt."""


def next_segments(jobs: Iterable[Job[Any]], prefill_chunk_tokens: int) -> list[Segment]:
    """The next part of each job that may run now, oldest job first.

    Short work always runs, whole. Long work shares `prefill_chunk_tokens`, so that it delays the rest by one chunk at
    most. Rows are all computed in one step: the last part of a job is at least as long as its `row_count`.
    """
    budget = prefill_chunk_tokens
    segments = []
    for job in jobs:
        pending = job.sequence.pending_count
        if pending <= min(_SHORT_TOKENS, prefill_chunk_tokens):
            segments.append(Segment(job.sequence, pending))
            continue
        count = _part(pending, job.row_count, budget)
        if count:
            segments.append(Segment(job.sequence, count))
            budget -= count
    return segments


def _part(pending: int, row_count: int, budget: int) -> int:
    """How many of the pending tokens to run within the budget; all of them only when the rows fit as well."""
    if pending <= budget:
        return pending
    before_rows = pending - row_count
    if before_rows > 0:
        return max(0, min(budget, before_rows))
    return pending if budget > 0 else 0
