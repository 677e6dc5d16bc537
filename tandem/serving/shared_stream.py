"""Many sequences on one stream: each is answered as if it had a stream of its own.

What the sequences have to say while a message is written goes into the next one, so a step of an engine that answers
sixteen sequences is one message, and one alone is sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError

from tandem.errors import CapacityError, InvalidRequestError, ServiceUnavailableError
from tandem.serving.calls import RunningCalls
from tandem.serving.edge import ended_by, unreadable
from tandem.serving.gate import Gate
from tandem.v1.types_pb2 import SequencePart
from tandem.wire.parts import take_message
from tandem.wire.status import Ending, ending_to_proto

_MOST_AHEAD = 8
"""Messages of one sequence that may wait for it. A coordinator has one under way, and its Finish; who sends more is not
read meanwhile."""
_MOST_WAITING_BYTES = 1 << 22
"""Sequences wait with what they do next while so much waits for the stream's reader."""


class Answer(Protocol):
    """A message of a sequence's stream."""

    def SerializeToString(self) -> bytes:
        """Its bytes."""


class Parts(Protocol):
    """A message of a shared stream."""

    @property
    def parts(self) -> Iterable[SequencePart]:
        """What it says of its sequences, in order."""


RequestT = TypeVar("RequestT")
PartsT = TypeVar("PartsT", bound=Parts)

Behaviour = Callable[[AsyncIterator[RequestT]], AsyncIterator[Answer]]
"""Answers the requests of one sequence."""


class SharedStreams:
    """What a server's shared streams have in common: each of their sequences passes its gate, and counts as a call."""

    def __init__(self) -> None:
        self._gate = Gate("")
        self._calls = RunningCalls()
        self._most = 1 << 30

    def stand_behind(self, gate: Gate, calls: RunningCalls, most: int) -> None:
        """Hold sequences to what the server's calls are held to.

        Args:
            gate: What lets calls through.
            calls: Where to count them.
            most: How many may run at once.
        """
        self._gate, self._calls, self._most = gate, calls, most

    async def serve(
        self,
        requests: AsyncIterator[PartsT],
        behaviour: Behaviour[RequestT],
        read: Callable[[bytes], RequestT],
    ) -> AsyncGenerator[list[SequencePart]]:
        """What to say of the sequences of one stream, in as few messages as can be.

        Args:
            requests: The stream's messages.
            behaviour: What answers one sequence.
            read: Reads a request of one sequence.

        Raises:
            InvalidRequestError: a message of the stream cannot be read.
        """
        stream = _SharedStream(self._admitted, behaviour, read)
        reading = asyncio.create_task(stream.read(requests))
        try:
            async for parts in stream.answers():
                yield parts
            await reading
        finally:
            reading.cancel()
            await stream.close()

    def _admitted(self) -> RunningCalls:
        """Where a new sequence is counted.

        Raises:
            ServiceUnavailableError: the server takes nothing new.
            CapacityError: it has as much as it may.
        """
        if because := self._gate.closed_because:
            raise ServiceUnavailableError(because)
        if len(self._calls) >= self._most:
            raise CapacityError(f"{len(self._calls)} calls run already, which is the most; try again")
        return self._calls


@dataclass(slots=True, eq=False)
class _Sequence(Generic[RequestT]):
    """One sequence of a shared stream, and what has come for it."""

    read: Callable[[bytes], RequestT]
    task: asyncio.Task[None] | None = None
    arrived: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(_MOST_AHEAD))
    """None: nothing more comes."""

    async def requests(self) -> AsyncIterator[RequestT]:
        """Its requests, as those of a stream of its own."""
        while (content := await self.arrived.get()) is not None:
            try:
                request = self.read(content)
            except DecodeError:
                raise unreadable() from None
            yield request


class _SharedStream(Generic[RequestT]):
    def __init__(
        self,
        admitted: Callable[[], RunningCalls],
        behaviour: Behaviour[RequestT],
        read: Callable[[bytes], RequestT],
    ) -> None:
        self._admitted = admitted
        self._behaviour = behaviour
        self._read = read
        self._sequences: dict[int, _Sequence[RequestT]] = {}
        self._latest = 0
        """The highest number that a sequence ever had."""
        self._outbox: list[SequencePart] = []
        self._waiting_bytes = 0
        """In the outbox, and in the message that is being written."""
        self._more = asyncio.Event()
        self._less = asyncio.Event()
        self._is_read = False

    async def read(self, requests: AsyncIterator[PartsT]) -> None:
        """Hand out what comes, until nothing more does.

        Raises:
            InvalidRequestError: a message cannot be read; its sequences end with it.
        """
        try:
            async for request in requests:
                for part in request.parts:
                    await self._take(part)
            for sequence in list(self._sequences.values()):
                await sequence.arrived.put(None)
        except InvalidRequestError:
            self._cancel()
            raise
        finally:
            self._is_read = True
            self._more.set()

    async def answers(self) -> AsyncIterator[list[SequencePart]]:
        """What there is to say, message by message, until all has been said."""
        while self._outbox or self._sequences or not self._is_read:
            if self._outbox:
                taken = take_message(self._outbox)
                yield taken
                self._waiting_bytes -= sum(len(part.message) for part in taken)
                self._less.set()
            else:
                self._more.clear()
                await self._more.wait()

    async def close(self) -> None:
        """End what still runs."""
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    def _cancel(self) -> list[asyncio.Task[None]]:
        tasks = [each.task for each in self._sequences.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _take(self, part: SequencePart) -> None:
        sequence = self._sequences.get(part.sequence)
        match part.WhichOneof("part"):
            case "message":
                if sequence is None and part.sequence > self._latest:
                    sequence = self._begin(part.sequence)
                if sequence is not None:  # one that has ended may be asked once more before that is known
                    await sequence.arrived.put(part.message)
            case "end":
                if sequence is not None and sequence.task is not None:
                    sequence.task.cancel()

    def _begin(self, number: int) -> _Sequence[RequestT]:
        self._latest = number
        sequence = self._sequences[number] = _Sequence(self._read)
        sequence.task = asyncio.create_task(self._run(number, sequence))
        sequence.task.add_done_callback(lambda _: self._is_over(number))
        return sequence

    async def _run(self, number: int, sequence: _Sequence[RequestT]) -> None:
        try:
            async with (
                self._admitted().running(),
                aclosing(cast("AsyncGenerator[Answer]", self._behaviour(sequence.requests()))) as answers,
            ):
                async for answer in answers:
                    self._say(SequencePart(sequence=number, message=answer.SerializeToString()))
                    while self._waiting_bytes >= _MOST_WAITING_BYTES:
                        self._less.clear()
                        await self._less.wait()
            ending = Ending()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends one sequence
            ending = ended_by(error)
        self._say(SequencePart(sequence=number, end=ending_to_proto(ending)))

    def _is_over(self, number: int) -> None:
        arrived = self._sequences.pop(number).arrived
        if arrived.full():
            arrived.get_nowait()  # nobody else will, and whoever reads the stream may be waiting for it
        self._more.set()

    def _say(self, part: SequencePart) -> None:
        self._outbox.append(part)
        self._waiting_bytes += len(part.message)
        self._more.set()
