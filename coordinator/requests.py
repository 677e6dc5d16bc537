"""The requests that run now: who asks what is going on finds them here, and may end one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.completion import Completion
from coordinator.throughput import TokenCounter
from tandem.admin import Outcomes
from tandem.channels import SequenceStream
from tandem.errors import AbortedError, InvalidRequestError, NotFoundError


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that runs."""

    request_id: str
    completion: Completion
    """As it grows."""
    prompt_tokens: int
    rule: str
    """Name of its acceptance rule."""
    num_speculative_tokens: int
    """0: the target alone."""
    started: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    draft_address: str | None = None
    """Where its proposals come from at the moment."""
    target_address: str | None = None
    """Where they are verified at the moment."""
    streams: Sequence[SequenceStream] = ()
    """What it has open on the services."""
    abort_reason: str | None = None
    """Set once someone has ended it; may be empty."""
    _task: asyncio.Task[object] | None = None
    _is_delivering: bool = False

    @property
    def completion_tokens(self) -> int:
        """How many tokens its completion has."""
        return self.completion.length - self.prompt_tokens

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """The block hands a piece over, and lasts until the next round begins, in another task.

        Raises:
            AbortedError: the request was ended meanwhile.
        """
        self._is_delivering = True
        try:
            yield
        finally:
            self._is_delivering = False
        self._works_in_this_task()
        if self.abort_reason is not None:
            raise self._aborted()

    def abort(self, reason: str = "") -> None:
        """End it. The services let go of it now, and its client learns why as soon as it reads.

        Args:
            reason: For the client; may be empty.
        """
        if self.abort_reason is not None:
            return
        self.abort_reason = reason
        if not self._is_delivering and self._task is not None:
            self._task.cancel()
            return
        # Between two rounds there is no task to cancel, and a client may put the next one off for long.
        for stream in self.streams:
            stream.cancel()

    @contextmanager
    def _abortable(self) -> Iterator[None]:
        """Turn the cancellation that `abort` caused into its error, as asyncio.timeout does with its own.

        Raises:
            AbortedError: the request was ended.
        """
        self._works_in_this_task()
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            was_aborted = self.abort_reason is not None and not self._is_delivering
            if was_aborted and task is not None and task.uncancel() == 0:
                raise self._aborted() from None
            raise

    def _works_in_this_task(self) -> None:
        self._task = asyncio.current_task()

    def _aborted(self) -> AbortedError:
        reason = f": {self.abort_reason}" if self.abort_reason else ""
        return AbortedError(
            f"an administrator ended the request after {self.completion_tokens} tokens{reason}"
        )


class Requests:
    """All requests that run, and how those before them ended."""

    def __init__(self) -> None:
        self.tokens = TokenCounter()
        """Of all completions."""
        self._active: dict[str, ActiveRequest] = {}
        self._ended = {"completed": 0, "failed": 0, "cancelled": 0, "aborted": 0}

    @contextmanager
    def running(self, request: ActiveRequest) -> Iterator[ActiveRequest]:
        """List the request for as long as the block lasts.

        Raises:
            AbortedError: the request was ended.
        """
        self._active[request.request_id] = request
        outcome = "failed"
        try:
            with request._abortable():
                yield request
            outcome = "completed"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self._ended[outcome if request.abort_reason is None else "aborted"] += 1
            del self._active[request.request_id]

    @property
    def outcomes(self) -> Outcomes:
        """How requests ended so far."""
        return Outcomes(**self._ended)

    def list(self) -> list[ActiveRequest]:
        """The oldest first."""
        return [*self._active.values()]

    def get(self, request_id: str) -> ActiveRequest | None:
        """The one with that id; None when it does not run."""
        return self._active.get(request_id)

    def find(self, beginning: str) -> ActiveRequest:
        """The one whose id begins so.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several, or nothing was given.
        """
        if not beginning:
            raise InvalidRequestError("request_id is empty; it must be an id, or the beginning of one")
        if exact := self._active.get(beginning):
            return exact
        found = [request for name, request in self._active.items() if name.startswith(beginning)]
        if not found:
            raise NotFoundError(f"no request that runs has an id that begins with {beginning}")
        if len(found) > 1:
            raise InvalidRequestError(
                f"{len(found)} requests that run have an id that begins with {beginning}; give more of it"
            )
        return found[0]
