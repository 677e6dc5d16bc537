"""Decides whether and when a request is retried: a pure function that both clients share."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tandem.errors import CapacityError, DeadlineError, ServiceUnavailableError, TandemError
from tandem.plural import plural


@dataclass(frozen=True, slots=True)
class Retries:
    """Number of retries of a request that has delivered nothing.

    Only for errors that may pass: a coordinator that cannot be reached, or one that is full and says when to come back.
    """

    attempts: int = 4
    """Maximum attempts, including the first."""
    first_wait_seconds: float = 0.1
    """Longest wait before the second try; it doubles with each."""
    longest_wait_seconds: float = 5.0
    """Longest wait before an attempt. A refusal that asks for a longer wait is raised instead."""

    def wait_seconds(self, error: TandemError, tried: int, uniform: float) -> float | None:
        """Seconds to wait before the next attempt; None: do not retry.

        Args:
            error: Error of the last attempt.
            tried: Number of attempts so far.
            uniform: Between 0 and 1: spreads the retries of clients that failed at the same moment.
        """
        if tried >= self.attempts:
            return None
        spread = self.first_wait_seconds * 2.0 ** (tried - 1)
        if isinstance(error, ServiceUnavailableError):
            # At least half of the wait remains.
            return min(spread * (0.5 + 0.5 * uniform), self.longest_wait_seconds)
        hint = error.retry_after_seconds if isinstance(error, CapacityError) else None
        return hint + spread * uniform if hint is not None and hint <= self.longest_wait_seconds else None


NO_RETRIES = Retries(attempts=1)
"""A single try."""


class Tries:
    """The tries of one request, within its time."""

    def __init__(self, retries: Retries, timeout_seconds: float | None, service: str) -> None:
        self.timeout_seconds = timeout_seconds
        self.delivered = 0
        """Tokens received so far."""
        self._retries = retries
        self._service = service
        self._tried = 0
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """How long the next try may take; None: without end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def wait_seconds(self, error: TandemError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            TandemError: the error itself, if there is no next attempt: tokens were delivered, a retry would not help,
                or the time is up.
        """
        self._tried += 1
        if isinstance(error, DeadlineError) and self.timeout_seconds is not None:
            # gRPC's own clock may strike before the coordinator has had its say.
            raise DeadlineError(
                f"{self._service}: the request took longer than the {self.timeout_seconds:g} s it was given; "
                f"{plural(self.delivered, 'token')} {'was' if self.delivered == 1 else 'were'} delivered"
            ) from None
        wait = None if self.delivered else self._retries.wait_seconds(error, self._tried, random.random())
        remaining = self.remaining_seconds
        if wait is None or (remaining is not None and wait >= remaining):
            raise error
        return wait
