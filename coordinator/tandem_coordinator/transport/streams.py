"""Streams to a service, each of which carries many sequences.

What sequences ask in one turn of the event loop, or while a message is written, goes into one message: sixteen
sequences that were answered at once ask again in one. A sequence that is alone on its stream asks in its own turn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from tandem.errors import ProtocolError, TandemError
from tandem.model.types import Cancel, Delta, Finish, common_length
from tandem.rpc.channels import ending_of
from tandem.rpc.outbox import Outbox
from tandem.telemetry.logs import log_fault
from tandem.wire.status import Ending
from tandem_coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from tandem_coordinator.transport.statuses import failure

logger = logging.getLogger(__name__)

MAX_STREAM_SECONDS = 60.0
"""A stream older than this accepts no new sequences, so that a renewed access token comes into use."""
FINISH_SECONDS = 0.5
"""How long a service may take to let go of a sequence before it is dropped. The end of a request waits for it."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class RemoteSequence:
    """The tokens on the other side of a stream, as far as the coordinator knows them.

    Committed tokens never change, so only those past the last known agreement are kept and compared.
    """

    def __init__(self) -> None:
        self._agreed = 0
        self._tail: list[int] = []

    @property
    def length(self) -> int:
        return self._agreed + len(self._tail)

    def kept_length(self, committed: Sequence[int]) -> int:
        """Number of tokens, from the first on, that the service holds and the coordinator committed."""
        return self._agreed + common_length(self._tail, committed[self._agreed :])

    def extend(self, proposed: Sequence[int]) -> None:
        """The service holds these tokens as well, which its own head has proposed."""
        self._tail.extend(proposed)

    def delta_to(
        self, committed: Sequence[int], proposed: Sequence[int] = (), *, with_last: bool = False
    ) -> Delta:
        """The change that makes the service hold the committed tokens and then the proposed ones.

        Args:
            committed: All of them.
            proposed: Those that are given with them.
            with_last: Name the last committed token in any case, as a step does behind which more is proposed.
        """
        kept = committed[self._agreed :]
        wanted = [*kept, *proposed]
        # A delta ends with the whole proposal, also where the service holds the beginning of it.
        matched = min(common_length(self._tail, wanted), max(len(kept) - with_last, 0))
        delta = Delta(self._agreed + matched, wanted[matched:])
        # Proposed tokens may yet be rejected: the agreement to rely on ends where they begin.
        agreed = min(delta.base_length, len(committed))
        self._tail = wanted[agreed - self._agreed :]
        self._agreed = agreed
        return delta


class StreamedSequence(ABC, Generic[RequestT, AnswerT]):
    """A sequence on a service, over a stream that it shares with others. Whoever begins it must cancel it in the end.

    The stream's reader hands it its answers: a task for each would cost 30 us.
    """

    def __init__(self, streams: Streams[RequestT, AnswerT], observer: StreamObserver = NO_OBSERVER) -> None:
        self.error: TandemError | None = None
        """Why nothing follows; None while something may."""
        self.number = 0
        """On the stream; 0 before the first message."""
        self.was_sent = False
        """True if the service may have received a message of the sequence."""
        self._stream = streams.open()
        self._stream.sequences.add(self)
        self._observer = observer
        self._traffic = observer.traffic
        self._remote = RemoteSequence()
        self._committed: Sequence[int] = ()
        """The tokens that stay, a list that grows."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read_at = 0.0
        """When the last answer was read, by the clock of `perf_counter`."""
        self._asked_at = 0.0
        self.unwritten = 0
        """Requests that wait to be written, as they do while the service does not read."""

    @abstractmethod
    def take(self, answer: AnswerT) -> None:
        """Take an answer. A TandemError that it raises ends the sequence."""

    @abstractmethod
    def notify(self) -> None:
        """Nothing follows; `error` says why. It may be called again."""

    def send(self, *requests: RequestT | Finish | Cancel) -> None:
        """Send requests after all that were sent before, without waiting. Nothing is sent once the sequence is over."""
        if self._ended.done():
            return
        self._asked_at = time.perf_counter()
        self.unwritten += len(requests)
        stream = self._stream
        if not self.number:
            self.number = next(stream.numbers)
            stream.numbered[self.number] = self
        for request in requests:
            stream.outbox.put(self.number, request)
        # Others may begin in the turn in which a sequence does, and go into its message.
        if not stream.is_writing:
            stream.is_writing = True
            if self.was_sent and len(stream.sequences) == 1:
                _go_on(stream._write())
            else:
                asyncio.get_running_loop().call_soon(_go_on, stream._write())

    async def finish(self) -> None:
        """End the sequence, and wait for the service to have let go of it."""
        self.send(Finish(self._remote.kept_length(self._committed)))
        await asyncio.wait({self._ended}, timeout=FINISH_SECONDS)  # otherwise it ends when it is dropped

    def cancel(self, error: TandemError | None = None) -> None:
        """Drop the sequence, whatever is being done for it. With an error, because it has failed."""
        self._stream.sequences.discard(self)
        if not self._stream.sequences:
            self._stream.end(Ending())
        elif self.number:
            self.send(Cancel())
            self._stream.numbered.pop(self.number, None)
        self.end(Ending())
        self._observer.ended(error)

    def goes_on(self) -> None:
        """The last answer is used, which ends the measurement of its wait."""
        if self._traffic.waits is not None:
            self._traffic.waits.answer(time.perf_counter() - self._read_at)

    # ---- called by the stream

    def was_written(self, began: float, size: int) -> None:
        """One of its requests, of so many bytes, was sent in a message whose write began then."""
        self.was_sent = True
        self.unwritten -= 1
        self._traffic.sent_bytes += size
        self._traffic.sent_messages += 1
        if self._traffic.waits is not None and self._asked_at <= began:
            self._traffic.waits.question(began - self._asked_at)

    def arrive(self, answer: AnswerT, size: int, read_at: float) -> None:
        """An answer has come, in a message that was read then."""
        self._read_at = read_at
        self._traffic.received_messages += 1
        self._traffic.received_bytes += size
        try:
            self.take(answer)
        except TandemError as error:
            self.fail(error)

    def end(self, ending: Ending) -> None:
        """The service has ended it, or the stream has."""
        if self._ended.done():
            return
        self._ended.set_result(None)
        self.fail(failure(self._stream.service, ending))

    def fail(self, error: TandemError) -> None:
        """End it by the service's own error, or by what came instead."""
        self.error = self.error or error
        self.notify()


class _Stream(Generic[RequestT, AnswerT]):
    """A stream and its sequences. It ends with the last of them."""

    def __init__(self, streams: Streams[RequestT, AnswerT]) -> None:
        self.service = streams.service
        self._streams = streams
        self._call = streams.call()
        self.sequences: set[StreamedSequence[RequestT, AnswerT]] = set()
        self.numbered: dict[int, StreamedSequence[RequestT, AnswerT]] = {}
        """Those that have sent something."""
        self.numbers = itertools.count(1)
        self.outbox: Outbox[RequestT | Finish | Cancel] = Outbox()
        self.old_at = time.monotonic() + MAX_STREAM_SECONDS
        self.is_over = False
        self.is_writing = False
        self._reading = asyncio.create_task(self._read())

    async def _write(self) -> None:
        try:
            while taken := self.outbox.take():
                began = time.perf_counter()
                content = self._streams.write(taken).SerializeToString()
                await self._call.write(content)
                share = len(content) // len(taken)
                for number, _ in taken:
                    if (sequence := self.numbered.get(number)) is not None:
                        sequence.was_written(began, share)
            self.is_writing = False
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # `_read` learns why; no other write follows
        except Exception as error:  # noqa: BLE001 - a stream that goes on without writing would be silent
            self._fail("what is asked of it cannot be written", error)

    async def _read(self) -> None:
        try:
            while isinstance(content := await self._call.read(), bytes):
                await self._hand_out(content)
            ending = Ending()
        except grpc.RpcError as error:
            ending = ending_of(error)
        except DecodeError:
            ending = Ending(
                grpc.StatusCode.INTERNAL, "its answer cannot be read; it must be the protobuf of the method"
            )
        except ProtocolError as error:
            ending = Ending(grpc.StatusCode.INTERNAL, str(error))
        except asyncio.CancelledError:
            ending = Ending(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
        except Exception as error:  # noqa: BLE001 - a stream that nobody reads would be silent
            self._fail("its answer cannot be read", error)
            return
        self.end(ending)

    def _fail(self, sentence: str, error: Exception) -> None:
        """End the stream, as lost, by an error that nobody has foreseen."""
        log_fault(logger, "stream lost", error, service=self.service)
        self.end(Ending(grpc.StatusCode.INTERNAL, sentence))

    async def _hand_out(self, content: bytes) -> None:
        """Give each sequence its answer, or the error in what came for it."""
        read_at = time.perf_counter()
        answers = list(self._streams.read(content))
        share = len(content) // max(len(answers), 1)
        for count, (number, answer) in enumerate(answers, 1):
            # There is no sequence where it was dropped before the service knew.
            if (sequence := self.numbered.get(number)) is not None:
                if isinstance(answer, Ending):
                    sequence.end(answer)
                elif isinstance(answer, ProtocolError):
                    sequence.fail(type(answer)(f"{self.service}: {answer}"))
                else:
                    sequence.arrive(answer, share, read_at)
            # A round takes some 40 us: the questions of 32 leave together, and do not wait for the rounds of
            # hundreds of others: with 256 streams the 99th percentile of a round's wait fell from 17 to 9 ms.
            if count % 32 == 0:
                await asyncio.sleep(0)  # their sequences go on, and what they ask is written

    def end(self, ending: Ending) -> None:
        """End the call and all sequences. A call that is dropped without being cancelled is never collected."""
        self.is_over = True
        self._call.cancel()
        self._reading.cancel()
        for sequence in list(self.sequences):
            sequence.end(ending)


def _go_on(coroutine: Coroutine[asyncio.Future[Any], None, None], _: object = None) -> None:
    """Run a coroutine in this turn until it waits, and on when that is over. A task begins in the next turn."""
    try:
        waited = coroutine.send(None)
    except StopIteration:
        return
    waited.add_done_callback(partial(_go_on, coroutine))


@dataclass(eq=False)
class Streams(Generic[RequestT, AnswerT]):
    """The streams to a service: one that takes new sequences, and older ones until their last sequences end."""

    service: str
    """Name of the service in errors."""
    call: Callable[[], Call]
    """Opens a stream."""
    write: Callable[[Iterable[tuple[int, RequestT | Finish | Cancel]]], Message]
    """Makes a message of what there is to say of sequences, by number."""
    read: Callable[[bytes], Iterable[tuple[int, AnswerT | Ending | ProtocolError]]]
    """Reads a message of the service, as answers to sequences by number, or what is wrong with one. Raises a
    ProtocolError or a DecodeError where the whole cannot be read."""
    _latest: _Stream[RequestT, AnswerT] | None = None

    def open(self) -> _Stream[RequestT, AnswerT]:
        latest = self._latest
        if latest is None or latest.is_over or time.monotonic() >= latest.old_at:
            self._latest = latest = _Stream(self)
        return latest
