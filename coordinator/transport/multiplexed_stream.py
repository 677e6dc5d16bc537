"""Many sequences on one stream to a service.

Messages that come up while another one is written go into the next one together: sixteen sequences that were answered
at once ask again in one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from coordinator.transport.sequence_stream import UNREADABLE, AnswerT, Call, Message, SequenceStream
from tandem.errors import ProtocolError, TandemError
from tandem.rpc.channels import Traffic, ending_of
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tandem.wire.columns import Arrived
from tandem.wire.parts import size_of, take_message
from tandem.wire.status import Ending, ending_from_proto

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
