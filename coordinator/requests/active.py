"""The running requests: lists them, ends them, and takes their places when their clients do not read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.decoding.completion import Completion
from coordinator.decoding.rounds import RequestRounds
from coordinator.failover.drafter import FailoverDrafter
from coordinator.failover.verifier import FailoverVerifier
from coordinator.requests.admission import Place
from coordinator.requests.plan import Plan
from coordinator.stats.speculation import TokenCounter
from coordinator.transport.draft_client import NoDrafter
from tandem.admin import Outcomes
from tandem.errors import AbortedError
from tandem.plural import plural

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that runs."""

    plan: Plan
    completion: Completion
    place: Place
    rounds: RequestRounds
    drafter: FailoverDrafter | NoDrafter
    verifier: FailoverVerifier
    started: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    has_stalled: bool = False
    """True if it has given up its places because its client does not read."""
    abort_reason: str | None = None
    """Reason given by whoever aborted it, may be empty; None while it was not aborted."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    """It runs in the task that makes it."""
    checks: int | None = None
    """Checks for stalled streams since a chunk began to wait for the client; None while the services compute."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def completion_tokens(self) -> int:
        return self.completion.length - len(self.plan.prompt)

    def stall(self) -> None:
        """Give up its places here and on the services while a chunk waits for its client."""
        self.has_stalled = True
        self.drafter.release()
        self.verifier.release()
        self.place.release()

    async def resume(self) -> None:
        """Take a place again after it has given up its own. The next round takes places on the services."""
        await self.place.take_again()
        self.has_stalled = False

    def abort(self, reason: str = "") -> None:
        """End it. The services free it now, and its client receives the error as soon as it reads."""
        if self.abort_reason is None:
            self.abort_reason = reason
            if self.task is not None:
                self.task.cancel()


_CHECKS = 4
"""A stream has stalled if it still delivers the same chunk at so many checks in a row after the first."""


class ActiveRequests:
    """All running requests, and how earlier ones ended. Those whose clients do not read give up their places.

    A timer for each chunk would cost more than the chunk, so one timer checks all streams now and then. It counts
    checks, not seconds: after a pause of the whole process no client has had a chance to read.
    """

    def __init__(self, stalled_seconds: float) -> None:
        """A stream stalls when a chunk has waited for so many seconds, or up to a quarter longer."""
        self.tokens = TokenCounter()
        self._check_interval = stalled_seconds / _CHECKS
        self._next_check: asyncio.TimerHandle | None = None
        self._active: dict[str, ActiveRequest] = {}
        self._ended = {"completed": 0, "failed": 0, "cancelled": 0, "aborted": 0}

    @contextmanager
    def running(self, request: ActiveRequest) -> Iterator[ActiveRequest]:
        self._active[request.request_id] = request
        if self._next_check is None:
            self._check_later()
        outcome = "failed"
        try:
            yield request
            outcome = "completed"
        except (asyncio.CancelledError, GeneratorExit) as error:
            outcome = "cancelled"
            if request.abort_reason is None or isinstance(error, GeneratorExit):
                raise
            # `abort` has caused the cancellation
            reason = f": {request.abort_reason}" if request.abort_reason else ""
            raise AbortedError(
                f"an administrator ended the request after {plural(request.completion_tokens, 'token')}{reason}"
            ) from None
        finally:
            self._ended[outcome if request.abort_reason is None else "aborted"] += 1
            del self._active[request.request_id]

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(**self._ended)

    def list(self) -> list[ActiveRequest]:
        """All running requests, the oldest first."""
        return [*self._active.values()]

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(self._check_interval, self._check)

    def _check(self) -> None:
        self._next_check = None
        for active in self._active.values():
            if active.checks is None or active.has_stalled:
                continue
            active.checks += 1
            if active.checks > _CHECKS:
                active.stall()
                extra = {"request_id": active.request_id, "tokens": active.completion_tokens}
                logger.info("stalled stream", extra=extra)
        if self._active:
            self._check_later()
