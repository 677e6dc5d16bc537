"""Which stream of a service a sequence goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from coordinator.transport.multiplexed_stream import (
    MakeMessage,
    MultiplexedSequence,
    MultiplexedStream,
    ReadColumns,
    ReadMessage,
)
from coordinator.transport.sequence_stream import AnswerT, Call, DedicatedStream, SequenceStream
from tandem.rpc.channels import Traffic
from tandem.wire.columns import Arrived


def _no_columns(_: object) -> Iterable[Arrived[Any]]:
    return ()


@dataclass(frozen=True, slots=True)
class Methods(Generic[AnswerT]):
    """A service's two methods for sequences."""

    service: str
    """Name of the service in errors."""
    open_one: Callable[[], Call]
    """Opens a dedicated stream."""
    read: Callable[[bytes], AnswerT]
    """Reads an answer of a dedicated stream."""
    open_many: Callable[[], Call]
    """Opens a shared stream."""
    message: MakeMessage
    """Makes a shared stream's message from its parts."""
    read_many: ReadMessage
    """Reads an answer of a shared stream."""
    read_columns: ReadColumns = _no_columns
    """Reads the answers that it has as columns."""


class StreamChoice(Generic[AnswerT]):
    """Gives a sequence that is alone on its service a stream of its own, and lets all others share one.

    A message on a dedicated stream arrives some 30 us sooner, at each end. Sixteen sequences on a shared stream take
    30 % less work in the coordinator and 25 % less in the target (docs/benchmarks.md).
    """

    def __init__(self, methods: Methods[AnswerT]) -> None:
        self._methods = methods
        self._own: DedicatedStream[AnswerT] | None = None
        self._shared: MultiplexedStream | None = None

    def stream(self, traffic: Traffic | None = None) -> SequenceStream[AnswerT]:
        """A stream for one sequence. The caller must cancel it in the end, whatever happens.

        Args:
            traffic: Counts the bytes; None: nobody reads the counts.
        """
        methods, shared = self._methods, self._shared
        if (self._own is None or self._own.is_over) and (shared is None or shared.is_over):
            self._own = DedicatedStream(methods.service, methods.open_one(), methods.read, traffic)
            return self._own
        if shared is None or not shared.takes_more:
            shared = self._shared = MultiplexedStream(
                methods.open_many(), methods.message, methods.read_many, methods.read_columns
            )
        return MultiplexedSequence(methods.service, shared, methods.read, traffic)
