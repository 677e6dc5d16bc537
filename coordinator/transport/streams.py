"""Sequences on a stream to a service."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import ProtocolError, TandemError
from tandem.rpc.channels import Traffic, ending_of, failure
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tandem.wire.columns import Arrived, size_of, take_message
from tandem.wire.status import Ending, ending_from_proto

_FINISH_SECONDS = 0.5
"""How long a service may take to let go of a sequence before it is dropped. The end of a request waits for it."""

UNREADABLE = "its answer cannot be read; it must be the protobuf of the method"
"""Reason given for bytes that are no message."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class Message(Protocol):
    """A message about one sequence."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


AnswerT = TypeVar("AnswerT")


class SequenceStream(ABC, Generic[AnswerT]):
    """Carries the messages of one sequence and their answers. The caller must cancel it in the end."""

    def __init__(self, service: str, read: Callable[[bytes], AnswerT], traffic: Traffic | None) -> None:
        """Begin.

        Args:
            service: Name of the service in errors.
            read: Reads an answer.
            traffic: Counts the bytes; None: nobody reads the counts.
        """
        self._service = service
        self._read = read
        self._traffic = traffic or Traffic()
        self._sender: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._fail: Callable[[TandemError], None] = _ignore
        self.was_sent = False
        """True if the service may have received a message of the sequence."""

    async def ask(self, *messages: Message) -> AnswerT:
        """Send these, and wait for the answer to the last.

        Raises:
            TandemError: the service has ended the sequence, or its answer cannot be read.
        """
        await self.send(*messages)
        return await self.receive()

    def read_on_arrival(self, read: Callable[[Arrived[AnswerT]], None]) -> None:
        """Hand each answer within a message for several sequences to `read` before any of the sequences goes on.

        Streams of one sequence have no such answers.
        """

    async def send(self, *messages: Message) -> None:
        """Send these, in order.

        Raises:
            TandemError: the service has ended the sequence, and there is nothing more to read.
        """
        await self._send([self._counted(message) for message in messages])

    async def receive(self) -> AnswerT:
        """The next answer. Cancelling the caller ends the sequence.

        Raises:
            TandemError: the service has ended the sequence, or its answer cannot be read.
        """
        return self._parsed(await self._receive())

    # ---- for a caller that never waits: it posts, and is told what comes

    def listen(self, take: Callable[[AnswerT], None], fail: Callable[[TandemError], None]) -> None:
        """Hand every answer from now on to `take`, as soon as it comes.

        Args:
            take: May raise a TandemError, which `fail` receives.
            fail: Receives the reason why nothing follows. It may be called again, for a later one.
        """
        self._reader = asyncio.create_task(self._hand_to(take, fail))
        self._fail = fail

    def post(self, *messages: Message) -> None:
        """Send these after all that was posted before, without waiting. Needs a listener, which learns of failures."""
        contents = [self._counted(message) for message in messages]
        self._sender = asyncio.create_task(self._send_after(self._sender, contents))

    def goes_on(self) -> None:
        """A listener's caller goes on with an answer that was handed to it. Ends the measurement of its wait."""

    @property
    def is_posting(self) -> bool:
        """True if the service does not read, so that what was posted still waits to be sent."""
        return self._sender is not None and not self._sender.done()

    def stop_listening(self) -> None:
        """Stop the tasks of `listen` and `post`."""
        for task in (self._sender, self._reader):
            if task is not None:
                task.add_done_callback(_forget)
                task.cancel()

    async def _hand_to(self, take: Callable[[AnswerT], None], fail: Callable[[TandemError], None]) -> None:
        try:
            while True:
                take(await self.receive())
        except TandemError as error:
            fail(error)

    async def _send_after(self, before: asyncio.Task[None] | None, contents: Sequence[bytes]) -> None:
        if before is not None and not before.done():
            await before
        try:
            await self._send(contents)
        except TandemError as error:
            self._fail(error)

    def _parsed(self, content: bytes | Arrived[AnswerT]) -> AnswerT:
        self._traffic.received_messages += 1
        if isinstance(content, Arrived):
            self._traffic.received_bytes += content.size
            return content.answer
        self._traffic.received_bytes += len(content)
        try:
            return self._read(content)
        except DecodeError:
            raise ProtocolError(f"{self._service}: {UNREADABLE}") from None

    async def finish(self, message: Message) -> None:
        """Send the message that ends the sequence, and wait for the service to have let go of it."""
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                await self._send([self._counted(message)])
                await self._receive()
        except (TimeoutError, TandemError):
            pass  # the sequence has ended, or will when it is dropped

    @abstractmethod
    def cancel(self) -> None:
        """Drop the sequence, whatever is being done for it."""

    @abstractmethod
    async def _send(self, contents: Sequence[bytes]) -> None:
        """Send these messages. Failures surface in `_receive`."""

    @abstractmethod
    async def _receive(self) -> bytes | Arrived[AnswerT]:
        """The next answer: its bytes, or what was read out of a message for several sequences.

        Raises:
            TandemError: the service has ended the sequence.
        """

    def _counted(self, message: Message) -> bytes:
        content = message.SerializeToString()
        self._traffic.sent_bytes += len(content)
        self._traffic.sent_messages += 1
        return content

    def _failure(self, ending: Ending) -> TandemError:
        return failure(self._service, ending)


def _ignore(_: TandemError) -> None:
    """Nobody listens."""


def _forget(task: asyncio.Task[None]) -> None:
    """A task may fail although it was cancelled, when the end of the call comes first."""
    if not task.cancelled():
        task.exception()


class DedicatedStream(SequenceStream[AnswerT]):
    """A sequence alone on a stream."""

    def __init__(
        self, service: str, call: Call, read: Callable[[bytes], AnswerT], traffic: Traffic | None
    ) -> None:
        super().__init__(service, read, traffic)
        self._call = call
        self.is_over = False
        """True if it was cancelled."""

    def cancel(self) -> None:
        """Cancel the call: a call that is dropped without being cancelled is never collected."""
        self._call.cancel()
        self.is_over = True

    async def _send(self, contents: Sequence[bytes]) -> None:
        try:
            for content in contents:
                await self._call.write(content)
            self.was_sent = True
        except asyncio.InvalidStateError:
            pass  # the service has ended the stream already; `_receive` learns how
        except grpc.RpcError as error:
            raise self._failure(ending_of(error)) from error

    async def _receive(self) -> bytes:
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            raise self._failure(ending_of(error)) from error
        if isinstance(answer, bytes):
            return answer
        raise self._failure(Ending())


_MAX_SECONDS = 60.0
"""A stream older than this accepts no new sequences, so that a renewed access token comes into use."""
ANSWERS_PER_TURN = 32
"""Answers of one message that are handed out in one turn of the event loop. A round takes some 40 us, so the questions
of so many leave together, and do not wait for the rounds of hundreds of others (docs/benchmarks.md)."""


class PartsMessage(Protocol):
    """A message of a shared stream."""

    @property
    def parts(self) -> Iterable[SequencePart]:
        """Its parts, one per sequence, in order."""


MakeMessage: TypeAlias = Callable[[Sequence[SequencePart]], Message]
ReadMessage: TypeAlias = Callable[[bytes], PartsMessage]
ReadColumns: TypeAlias = Callable[[Any], Iterable[Arrived[Any]]]
"""Reads the answers that a message has as columns; raises a ProtocolError for columns that do not fit together."""


class MultiplexedSequence(SequenceStream[AnswerT]):
    """One sequence's share of a stream."""

    def __init__(
        self,
        service: str,
        stream: MultiplexedStream,
        read: Callable[[bytes], AnswerT],
        traffic: Traffic | None,
    ) -> None:
        super().__init__(service, read, traffic)
        self._stream = stream
        self._arrived: deque[bytes | Arrived[AnswerT]] = deque()
        self._more: asyncio.Future[None] | None = None
        """Set while somebody waits for the next answer."""
        self._take: Callable[[AnswerT], None] | None = None
        """The listener, if there is one."""
        self._ending: Ending | None = None
        self._on_arrival: Callable[[Arrived[AnswerT]], None] | None = None
        self._read_at = 0.0
        """When its last answer was read, by the clock of `perf_counter`."""
        self.asked_at = 0.0
        """When its last question was put into the outbox."""
        self.number = 0
        """On the stream; 0 before its first message."""
        stream.add(self)

    def cancel(self) -> None:
        """See `SequenceStream`."""
        self._stream.drop(self)

    def listen(self, take: Callable[[AnswerT], None], fail: Callable[[TandemError], None]) -> None:
        """See `SequenceStream`. The stream's own reader calls the listener: a task for each answer costs 30 us."""
        self._take, self._fail = take, fail

    def read_on_arrival(self, read: Callable[[Arrived[AnswerT]], None]) -> None:
        """See `SequenceStream`."""
        self._on_arrival = read

    def post(self, *messages: Message) -> None:
        """See `SequenceStream`."""
        for message in messages:
            self._stream.send(self, self._counted(message))

    async def ask(self, *messages: Message) -> AnswerT:
        """See `SequenceStream`. Sending waits for nothing here, so no coroutine is made for it."""
        self.post(*messages)
        return self._parsed(await self._receive())

    async def _send(self, contents: Sequence[bytes]) -> None:
        for content in contents:
            self._stream.send(self, content)

    async def _receive(self) -> bytes | Arrived[AnswerT]:
        while not self._arrived:
            if self._ending is not None:
                raise self._failure(self._ending)
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        self.goes_on()
        return self._arrived.popleft()

    def goes_on(self) -> None:
        """See `SequenceStream`."""
        if self._traffic.waits is not None:
            self._traffic.waits.answer(time.perf_counter() - self._read_at)

    def was_written(self, began: float) -> None:
        """A message has left the outbox, in a write that began then."""
        self.was_sent = True
        if self._traffic.waits is not None and self.asked_at <= began:
            self._traffic.waits.question(began - self.asked_at)

    def arrive(self, content: bytes | Arrived[AnswerT], read_at: float) -> None:
        """An answer has come, in a message that was read then."""
        self._read_at = read_at
        if self._on_arrival is not None and isinstance(content, Arrived):
            self._on_arrival(content)
        if self._take is None:
            self._arrived.append(content)
            self._wake()
            return
        try:
            self._take(self._parsed(content))
        except TandemError as error:
            self._fail(error)

    def end(self, ending: Ending) -> None:
        """The stream has ended."""
        if self._ending is None:
            self._ending = ending
            self._fail(self._failure(ending))
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class MultiplexedStream:
    """A stream and its sequences. It ends with the last of them."""

    def __init__(
        self, call: Call, message: MakeMessage, read: ReadMessage, read_columns: ReadColumns
    ) -> None:
        """Begin to read and to write.

        Args:
            call: Of a method that takes many sequences.
            message: Makes its message of parts.
            read: Reads what it answers.
            read_columns: Reads what such an answer has as columns.
        """
        self._call = call
        self._message = message
        self._read_message = read
        self._read_columns = read_columns
        self._sequences: set[MultiplexedSequence[Any]] = set()
        self._numbered: dict[int, MultiplexedSequence[Any]] = {}
        self._numbers = itertools.count(1)
        self._outbox: list[SequencePart] = []
        self._more = asyncio.Event()
        self._old_at = time.monotonic() + _MAX_SECONDS
        self._ending: Ending | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def is_over(self) -> bool:
        """True if the last sequence has left, or the stream broke."""
        return self._ending is not None

    @property
    def takes_more(self) -> bool:
        """True if further sequences may come."""
        return not self.is_over and time.monotonic() < self._old_at

    def add(self, sequence: MultiplexedSequence[Any]) -> None:
        """Take a sequence."""
        self._sequences.add(sequence)

    def send(self, sequence: MultiplexedSequence[Any], content: bytes) -> None:
        """Queue a message of a sequence. Sequences are numbered in the order of their first messages."""
        if sequence not in self._sequences:
            return  # the sequence was dropped
        if not sequence.number:
            sequence.number = next(self._numbers)
            self._numbered[sequence.number] = sequence
        sequence.asked_at = time.perf_counter()
        self._put(SequencePart(sequence=sequence.number, message=content))

    def drop(self, sequence: MultiplexedSequence[Any]) -> None:
        """End a sequence's share of the stream."""
        sequence.end(Ending())
        if sequence in self._sequences and sequence.number:
            del self._numbered[sequence.number]
            self._put(SequencePart(sequence=sequence.number, end=SequenceEnd()))
        self._sequences.discard(sequence)
        if not self._sequences:
            self._end(Ending())

    def _put(self, part: SequencePart) -> None:
        self._outbox.append(part)
        self._more.set()

    async def _write(self) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # `_read` learns why
            while await self._more.wait():
                self._more.clear()
                while self._outbox:
                    taken = take_message(self._outbox, size_of)
                    began = time.perf_counter()
                    await self._call.write(self._message(taken).SerializeToString())
                    for part in taken:
                        if (sequence := self._numbered.get(part.sequence)) is not None:
                            sequence.was_written(began)

    async def _read(self) -> None:
        try:
            while isinstance(answer := await self._call.read(), bytes):
                await self._hand_out(self._read_message(answer))
            ending = Ending()
        except grpc.RpcError as error:
            ending = ending_of(error)
        except DecodeError:
            ending = Ending(grpc.StatusCode.INTERNAL, UNREADABLE)
        except ProtocolError as error:
            ending = Ending(grpc.StatusCode.INTERNAL, str(error))
        except asyncio.CancelledError:
            ending = Ending(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
        self._end(ending)

    async def _hand_out(self, message: PartsMessage) -> None:
        """Give each sequence its part. Columns that do not fit together end the stream: nobody knows whose they are.

        Raises:
            ProtocolError: there are such columns.
        """
        read_at = time.perf_counter()
        answers: Iterator[Arrived[Any] | SequencePart] = chain(self._read_columns(message), message.parts)
        while some := list(islice(answers, ANSWERS_PER_TURN)):
            for each in some:
                self._hand_over(each, read_at)
            if len(some) == ANSWERS_PER_TURN:
                await asyncio.sleep(0)  # their sequences go on, and what they ask is written

    def _hand_over(self, each: Arrived[Any] | SequencePart, read_at: float) -> None:
        sequence = self._numbered.get(each.sequence)
        if sequence is None:
            return  # the sequence was dropped before the service knew
        if isinstance(each, Arrived):
            sequence.arrive(each, read_at)
        elif each.WhichOneof("part") == "end":
            sequence.end(ending_from_proto(each.end))
        else:
            sequence.arrive(each.message, read_at)

    def _end(self, ending: Ending) -> None:
        """End the call and all sequences. A call that is dropped without being cancelled is never collected."""
        self._ending = self._ending or ending
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        for sequence in self._sequences:
            sequence.end(ending)


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
