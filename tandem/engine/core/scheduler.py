"""Which tokens go into the next step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Segment

_SHORT_TOKENS = 32
"""Work of at most this many tokens is short: a draft step, a verify block."""


def next_segments(jobs: Collection[Job[Any]], prompt_tokens: int) -> list[Segment]:
    """The next part of each job that may run now, oldest job first.

    Work of a sequence that has had an answer always runs, whole, if it is short. All other is reading prompts and
    shares `prompt_tokens`, so that it delays the rest by so much at most: short prompts first, then parts of long
    ones. Rows are all computed in one step: the last part of a job is at least as long as its `row_count`.
    """
    short = min(_SHORT_TOKENS, prompt_tokens)
    budget = prompt_tokens
    counts: dict[Job[Any], int] = {}
    for job in jobs:
        pending = job.sequence.pending_count
        if pending > short:
            continue
        if not job.sequence.is_new:
            counts[job] = pending
        elif pending <= budget:
            counts[job] = pending
            budget -= pending
    for job in jobs:
        pending = job.sequence.pending_count
        if pending > short:
            counts[job] = _part(pending, job.row_count, budget)
            budget -= counts[job]
    return [Segment(job.sequence, counts[job]) for job in jobs if counts.get(job)]


def _part(pending: int, row_count: int, budget: int) -> int:
    """How many of the pending tokens to run within the budget; all of them only when the rows fit as well."""
    if pending <= budget:
        return pending
    before_rows = pending - row_count
    if before_rows > 0:
        return max(0, min(budget, before_rows))
    return pending if budget > 0 else 0
