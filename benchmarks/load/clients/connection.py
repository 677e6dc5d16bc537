"""The client that a load uses, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from benchmarks.load.figures import Served


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A completion that a client asks for."""

    prompt: tuple[int, ...]
    output_tokens: int
    """Its length: the end-of-sequence token does not end it."""
    temperature: float


class Connection(Protocol):
    """A client's connection, which has at most one request at once."""

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """Read a completion to its end, and note in `served` when its chunks come and how many tokens it has.

        Raises:
            TandemError: it failed.
        """


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Makes a client's connection."""
