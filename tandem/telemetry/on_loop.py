"""Reads what belongs to the event loop from the threads that collect metrics."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

_PATIENCE_SECONDS = 2.0


class OnLoop(Generic[ValueT]):
    """A function that runs on the event loop and may be called from any thread. Construct it on the loop's thread."""

    def __init__(self, function: Callable[[], ValueT]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __call__(self) -> ValueT | None:
        """Its value; None when the loop has ended or does not turn."""
        if threading.get_ident() == self._thread:
            return self._function()
        answer: concurrent.futures.Future[ValueT] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
            return answer.result(_PATIENCE_SECONDS)
        except (RuntimeError, TimeoutError):
            return None

    def _answer(self, answer: concurrent.futures.Future[ValueT]) -> None:
        try:
            answer.set_result(self._function())
        except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
            answer.set_exception(error)
