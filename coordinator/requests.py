"""The requests that run now: who asks what is going on finds them here, and may end one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.completion import Completion


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


class Requests:
    """All requests that run."""

    def __init__(self) -> None:
        self._active: dict[str, ActiveRequest] = {}

    @contextmanager
    def running(self, request: ActiveRequest) -> Iterator[ActiveRequest]:
        """List the request for as long as the block lasts."""
        self._active[request.request_id] = request
        try:
            yield request
        finally:
            del self._active[request.request_id]

    def list(self) -> list[ActiveRequest]:
        """The oldest first."""
        return [*self._active.values()]

    def get(self, request_id: str) -> ActiveRequest | None:
        """The one with that id; None when it does not run."""
        return self._active.get(request_id)
