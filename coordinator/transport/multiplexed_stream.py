"""Many sequences on one stream to a service.

Messages that come up while another one is written go into the next one together: sixteen sequences that were answered
at once ask again in one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from coordinator.transport.sequence_stream import UNREADABLE, AnswerT, Call, Message, SequenceStream
from tandem.rpc.channels import ending_of
from tandem.rpc.traffic import Traffic
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tandem.wire.parts import take_message
from tandem.wire.status import Ending, ending_from_proto

_MAX_SECONDS = 60.0
"""A stream older than this accepts no new sequences, so that a renewed access token comes into use."""


class PartsMessage(Protocol):
    """A message of a shared stream."""

    @property
    def parts(self) -> Iterable[SequencePart]:
        """Its parts, one per sequence, in order."""


MakeMessage: TypeAlias = Callable[[Sequence[SequencePart]], Message]
ReadMessage: TypeAlias = Callable[[bytes], PartsMessage]


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
        self._arrived: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._ending: Ending | None = None
        stream.add(self)

    def cancel(self) -> None:
        """See `SequenceStream`."""
        self._stream.drop(self)

    async def _send(self, contents: Sequence[bytes]) -> None:
        for content in contents:
            self._stream.send(self, content)

    async def _receive(self) -> bytes:
        while not self._arrived:
            if self._ending is not None:
                raise self._failure(self._ending)
            self._more.clear()
            await self._more.wait()
        return self._arrived.popleft()

    def arrive(self, content: bytes) -> None:
        """An answer has come."""
        self._arrived.append(content)
        self._more.set()

    def end(self, ending: Ending) -> None:
        """The stream has ended."""
        self._ending = self._ending or ending
        self._more.set()


class MultiplexedStream:
    """A stream and its sequences. It ends with the last of them."""

    def __init__(self, call: Call, message: MakeMessage, read: ReadMessage) -> None:
        """Begin to read and to write.

        Args:
            call: Of a method that takes many sequences.
            message: Makes its message of parts.
            read: Reads what it answers.
        """
        self._call = call
        self._message = message
        self._read_message = read
        self._sequences: dict[MultiplexedSequence[Any], int] = {}
        """Numbers of the sequences; 0 before the first message of one."""
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
        self._sequences[sequence] = 0

    def send(self, sequence: MultiplexedSequence[Any], content: bytes) -> None:
        """Queue a message of a sequence. Sequences are numbered in the order of their first messages."""
        if sequence not in self._sequences:
            return  # the sequence was dropped
        number = self._sequences[sequence] = self._sequences[sequence] or next(self._numbers)
        self._numbered[number] = sequence
        self._put(SequencePart(sequence=number, message=content))

    def drop(self, sequence: MultiplexedSequence[Any]) -> None:
        """End a sequence's share of the stream."""
        number = self._sequences.pop(sequence, 0)
        sequence.end(Ending())
        if number:
            del self._numbered[number]
            self._put(SequencePart(sequence=number, end=SequenceEnd()))
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
                    taken = take_message(self._outbox)
                    await self._call.write(self._message(taken).SerializeToString())
                    for part in taken:
                        if (sequence := self._numbered.get(part.sequence)) is not None:
                            sequence.was_sent = True

    async def _read(self) -> None:
        try:
            while isinstance(answer := await self._call.read(), bytes):
                self._hand_out(self._read_message(answer).parts)
            ending = Ending()
        except grpc.RpcError as error:
            ending = ending_of(error)
        except DecodeError:
            ending = Ending(grpc.StatusCode.INTERNAL, UNREADABLE)
        except asyncio.CancelledError:
            ending = Ending(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
        self._end(ending)

    def _hand_out(self, parts: Iterable[SequencePart]) -> None:
        for part in parts:
            sequence = self._numbered.get(part.sequence)
            if sequence is None:
                continue  # the sequence was dropped before the service knew
            if part.WhichOneof("part") == "end":
                sequence.end(ending_from_proto(part.end))
            else:
                sequence.arrive(part.message)

    def _end(self, ending: Ending) -> None:
        """End the call and all sequences. A call that is dropped without being cancelled is never collected."""
        self._ending = self._ending or ending
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        for sequence in self._sequences:
            sequence.end(ending)
