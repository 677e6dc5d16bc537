"""Which stream of a service a sequence goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from coordinator.lane import AnswerT, Call, Lane, OwnStream
from coordinator.shared_stream import MakeMessage, ReadMessage, SharedLane, SharedStream
from tandem.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Methods(Generic[AnswerT]):
    """A service's two methods for sequences."""

    service: str
    """What the service is called in errors."""
    open_one: Callable[[], Call]
    """Opens a stream for one sequence."""
    read: Callable[[bytes], AnswerT]
    """Reads an answer to one."""
    open_many: Callable[[], Call]
    """Opens a stream for many."""
    message: MakeMessage
    """Makes a message for many of parts."""
    read_many: ReadMessage
    """Reads an answer to many."""


class Streams(Generic[AnswerT]):
    """Gives a sequence that is alone a stream of its own, and has all others share one.

    On a stream of one's own each message is there some 30 us sooner, at each end. Sixteen sequences that share one are
    30 % less work for the coordinator and 25 % less for the target (docs/benchmarks.md).
    """

    def __init__(self, methods: Methods[AnswerT]) -> None:
        self._methods = methods
        self._own: OwnStream[AnswerT] | None = None
        self._shared: SharedStream | None = None

    def lane(self, traffic: Traffic | None = None) -> Lane[AnswerT]:
        """A line for one sequence. It must be cancelled in the end, whatever happens.

        Args:
            traffic: Where to count what it carries; None: nobody asks.
        """
        methods, shared = self._methods, self._shared
        if (self._own is None or self._own.is_over) and (shared is None or shared.is_over):
            self._own = OwnStream(methods.service, methods.open_one(), methods.read, traffic)
            return self._own
        if shared is None or not shared.takes_more:
            shared = self._shared = SharedStream(methods.open_many(), methods.message, methods.read_many)
        return SharedLane(methods.service, shared, methods.read, traffic)
