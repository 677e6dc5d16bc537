"""Many sequences on one stream to a service.

What they have to say while a message is written goes into the next one: sixteen sequences that were answered at once
ask again in one message.
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

from coordinator.lane import UNREADABLE, AnswerT, Call, Lane, Message
from tandem.channels import ending_of
from tandem.traffic import Traffic
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tandem.wire.parts import take_message
from tandem.wire.status import Ending, ending_from_proto

_MOST_SECONDS = 60.0
"""A stream takes no more sequences once it is so old: each shows the token that is good now."""


class PartsMessage(Protocol):
    """A message of a shared stream."""

    @property
    def parts(self) -> Iterable[SequencePart]:
        """What it says of its sequences, in order."""


MakeMessage: TypeAlias = Callable[[Sequence[SequencePart]], Message]
ReadMessage: TypeAlias = Callable[[bytes], PartsMessage]


class SharedLane(Lane[AnswerT]):
    """What one sequence has of a stream."""

    def __init__(
        self, service: str, stream: SharedStream, read: Callable[[bytes], AnswerT], traffic: Traffic | None
    ) -> None:
        super().__init__(service, read, traffic)
        self._stream = stream
        self._arrived: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._ending: Ending | None = None
        stream.add(self)

    def cancel(self) -> None:
        """See `Lane`."""
        self._stream.drop(self)

    async def _send(self, contents: Sequence[bytes]) -> None:
        for content in contents:
            self._stream.say(self, content)

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
        """Nothing more comes."""
        self._ending = self._ending or ending
        self._more.set()


class SharedStream:
    """A stream and its lanes. It ends with the last of them."""

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
        self._lanes: dict[SharedLane[Any], int] = {}
        """With their numbers; 0: nothing was said of it yet."""
        self._numbered: dict[int, SharedLane[Any]] = {}
        self._numbers = itertools.count(1)
        self._outbox: list[SequencePart] = []
        self._more = asyncio.Event()
        self._old_at = time.monotonic() + _MOST_SECONDS
        self._ending: Ending | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def is_over(self) -> bool:
        """Whether the last lane is gone, or the stream broke."""
        return self._ending is not None

    @property
    def takes_more(self) -> bool:
        """Whether further sequences may come."""
        return not self.is_over and time.monotonic() < self._old_at

    def add(self, lane: SharedLane[Any]) -> None:
        """Take a sequence."""
        self._lanes[lane] = 0

    def say(self, lane: SharedLane[Any], content: bytes) -> None:
        """Have this sent. Numbers count up in the order in which sequences are first spoken of."""
        if lane not in self._lanes:
            return  # it was dropped
        number = self._lanes[lane] = self._lanes[lane] or next(self._numbers)
        self._numbered[number] = lane
        self._put(SequencePart(sequence=number, message=content))

    def drop(self, lane: SharedLane[Any]) -> None:
        """Do no more for a sequence."""
        number = self._lanes.pop(lane, 0)
        lane.end(Ending())
        if number:
            del self._numbered[number]
            self._put(SequencePart(sequence=number, end=SequenceEnd()))
        if not self._lanes:
            self._end(Ending())

    def _put(self, part: SequencePart) -> None:
        self._outbox.append(part)
        self._more.set()

    async def _write(self) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # whoever reads is told why
            while await self._more.wait():
                self._more.clear()
                while self._outbox:
                    taken = take_message(self._outbox)
                    await self._call.write(self._message(taken).SerializeToString())
                    for part in taken:
                        if (lane := self._numbered.get(part.sequence)) is not None:
                            lane.was_sent = True

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
            lane = self._numbered.get(part.sequence)
            if lane is None:
                continue  # it was dropped, which the service did not know yet
            if part.WhichOneof("part") == "end":
                lane.end(ending_from_proto(part.end))
            else:
                lane.arrive(part.message)

    def _end(self, ending: Ending) -> None:
        """A call that is dropped without being cancelled is never collected."""
        self._ending = self._ending or ending
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        for lane in self._lanes:
            lane.end(ending)
