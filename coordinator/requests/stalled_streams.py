"""Stalled streams: those whose clients do not read give up their places, and go on when the clients read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.requests.active import ActiveRequest

logger = logging.getLogger(__name__)

_CHECKS = 4
"""A stream has stalled if it still delivers the same chunk at so many checks in a row after the first."""


class StalledStreams:
    """Takes the places of streams whose clients do not read.

    A timer for each chunk would cost more than the chunk, so one timer checks all streams now and then. It counts
    checks, not seconds: after a pause of the whole process no client has had a chance to read.
    """

    def __init__(self, seconds: float) -> None:
        """Begin without streams.

        Args:
            seconds: How long a chunk may wait for its client before the stream counts as stalled; up to a quarter
                longer.
        """
        self._interval = seconds / _CHECKS
        self._seen: dict[ActiveRequest, tuple[int, int]] = {}
        """For each stream, its tokens at the last check, and the number of earlier checks with as many."""
        self._next_check: asyncio.TimerHandle | None = None

    @contextmanager
    def following(self, active: ActiveRequest) -> Iterator[None]:
        """Check the request's stream for as long as the block lasts."""
        self._seen[active] = (0, 0)
        if self._next_check is None:
            self._check_later()
        try:
            yield
        finally:
            del self._seen[active]

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(self._interval, self._check)

    def _check(self) -> None:
        self._next_check = None
        for active, (tokens, checks) in self._seen.items():
            count = active.completion_tokens
            checks = checks + 1 if active.is_delivering and count == tokens else 0
            self._seen[active] = (count, checks)
            if checks >= _CHECKS and not active.has_stalled:
                active.stall()
                logger.info("stalled stream", extra={"request_id": active.request_id, "tokens": count})
        if self._seen:
            self._check_later()
