"""When a request is worth another try, and after how long: a pure decision, shared by both clients."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tandem.errors import CapacityError, DeadlineError, ServiceUnavailableError, TandemError


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request that nothing was delivered of is tried again.

    Only for what may pass: a coordinator that cannot be reached, or one that is full and says when to come back.
    """

    attempts: int = 4
    """Most tries in all; 1 for none but the first."""
    first_wait_seconds: float = 0.1
    """Longest wait before the second try; it doubles with each."""
    longest_wait_seconds: float = 5.0
    """Longest wait before any. Of one who asks for more patience than that, the refusal is told instead."""

    def wait_seconds(self, error: TandemError, tried: int, uniform: float) -> float | None:
        """How long to wait before the next try; None when there is to be none.

        Args:
            error: What became of the last one.
            tried: How many there were.
            uniform: Between 0 and 1: spreads the tries of many clients that failed at the same moment.
        """
        if tried >= self.attempts:
            return None
        spread = self.first_wait_seconds * 2.0 ** (tried - 1)
        if isinstance(error, ServiceUnavailableError):
            # Half of it is kept, so that a wait is one.
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
        """Tokens that came so far."""
        self._retries = retries
        self._service = service
        self._tried = 0
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """How long the next try may take; None: without end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def wait_seconds(self, error: TandemError) -> float:
        """How long to wait before the next try.

        Raises:
            TandemError: the error itself, when there is to be none: something was delivered, it would not help, or the
                time is up by then.
        """
        self._tried += 1
        if isinstance(error, DeadlineError) and self.timeout_seconds is not None:
            # gRPC's own clock may strike before the coordinator has had its say.
            raise DeadlineError(
                f"{self._service}: the request took longer than the {self.timeout_seconds:g} s it was given; "
                f"{self.delivered} tokens were delivered"
            ) from None
        wait = None if self.delivered else self._retries.wait_seconds(error, self._tried, random.random())
        remaining = self.remaining_seconds
        if wait is None or (remaining is not None and wait >= remaining):
            raise error
        return wait
