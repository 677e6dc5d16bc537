"""Many sequences on one stream, each served as if it had a stream of its own.

Answers that come up while a message is written go into the next one together. So a step of an engine that answers
sixteen sequences makes one message, and a single answer is sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from google.protobuf.message import DecodeError

from tandem.errors import CapacityError, InvalidRequestError, ServiceUnavailableError
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls, ended_by, unreadable
from tandem.v1.types_pb2 import SequencePart
from tandem.wire.columns import ColumnPart, size_of, take_message
from tandem.wire.status import Ending, ending_to_proto

_MAX_AHEAD = 8
"""Messages that may wait for one sequence. A coordinator sends one, and its Finish; from a peer that sends more the
stream reads no further."""
_MAX_WAITING_BYTES = 1 << 22
"""Sequences pause while so many bytes wait for the stream's reader."""


class Answer(Protocol):
    """A message of a sequence's stream."""

    def SerializeToString(self) -> bytes:
        """Its bytes."""

    def HasField(self, field_name: Literal["columns"]) -> bool:
        """True if it has columns, which are joined with those of other sequences."""

    def ByteSize(self) -> int:
        """How many bytes it has."""


class Parts(Protocol):
    """A message of a shared stream."""

    @property
    def parts(self) -> Iterable[SequencePart]:
        """Its parts, one per sequence, in order."""


RequestT = TypeVar("RequestT")
PartsT = TypeVar("PartsT", bound=Parts)

Part: TypeAlias = "SequencePart | ColumnPart[Any]"
"""An answer of one sequence, on its way into a message."""

Behaviour = Callable[[AsyncIterator[RequestT]], AsyncIterator[Answer]]
"""Answers the requests of one sequence."""


class MultiplexedStreams:
    """A server's multiplexed streams. Each of their sequences passes the readiness check and counts as a call."""

    def __init__(self) -> None:
        self._readiness = ReadinessInterceptor("")
        self._calls = RunningCalls()
        self._max_calls = 1 << 30

    def apply_limits(self, readiness: ReadinessInterceptor, calls: RunningCalls, max_calls: int) -> None:
        """Apply the server's limits on calls to sequences.

        Args:
            readiness: Admits or refuses calls.
            calls: Counts them.
            max_calls: Maximum calls at once.
        """
        self._readiness, self._calls, self._max_calls = readiness, calls, max_calls

    async def serve(
        self,
        requests: AsyncIterator[PartsT],
        behaviour: Behaviour[RequestT],
        read: Callable[[bytes], RequestT],
    ) -> AsyncGenerator[list[Part]]:
        """Queue of the messages of one stream's sequences, sent in as few messages as possible.

        Args:
            requests: The stream's messages.
            behaviour: What answers one sequence.
            read: Reads a request of one sequence.

        Raises:
            InvalidRequestError: a message of the stream cannot be read.
        """
        stream = _MultiplexedStream(self._admitted, behaviour, read)
        reading = asyncio.create_task(stream.read(requests))
        try:
            async for parts in stream.answers():
                yield parts
            await reading
        finally:
            reading.cancel()
            await stream.close()

    def _admitted(self) -> RunningCalls:
        """Count a new sequence.

        Raises:
            ServiceUnavailableError: the server accepts no new calls.
            CapacityError: it has the maximum.
        """
        if because := self._readiness.closed_because:
            raise ServiceUnavailableError(because)
        if len(self._calls) >= self._max_calls:
            raise CapacityError(f"{len(self._calls)} calls run already, which is the most; try again")
        return self._calls


@dataclass(slots=True, eq=False)
class _Sequence(Generic[RequestT]):
    """One sequence of a shared stream, and its received messages."""

    read: Callable[[bytes], RequestT]
    task: asyncio.Task[None] | None = None
    arrived: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(_MAX_AHEAD))
    """None: the stream has ended."""

    async def requests(self) -> AsyncIterator[RequestT]:
        """Its requests, as those of a stream of its own."""
        while (content := await self.arrived.get()) is not None:
            try:
                request = self.read(content)
            except DecodeError:
                raise unreadable() from None
            yield request


class _MultiplexedStream(Generic[RequestT]):
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
        self._outbox: list[Part] = []
        self._waiting_bytes = 0
        """In the outbox, and in the message that is being written."""
        self._more = asyncio.Event()
        self._less = asyncio.Event()
        self._is_read = False

    async def read(self, requests: AsyncIterator[PartsT]) -> None:
        """Distribute received messages until the stream ends.

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

    async def answers(self) -> AsyncIterator[list[Part]]:
        """Yield messages until all queued parts are sent."""
        while self._outbox or self._sequences or not self._is_read:
            if self._outbox:
                taken = take_message(self._outbox, size_of)
                yield taken
                self._waiting_bytes -= sum(map(size_of, taken))
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
                    self._say(_part(number, answer))
                    while self._waiting_bytes >= _MAX_WAITING_BYTES:
                        self._less.clear()
                        await self._less.wait()
            ending = Ending()
        except Exception as error:  # noqa: BLE001 - any error ends only one sequence
            ending = ended_by(error)
        self._say(SequencePart(sequence=number, end=ending_to_proto(ending)))

    def _is_over(self, number: int) -> None:
        arrived = self._sequences.pop(number).arrived
        if arrived.full():
            arrived.get_nowait()  # nobody else does, and the stream's reader may be waiting for it
        self._more.set()

    def _say(self, part: Part) -> None:
        self._outbox.append(part)
        self._waiting_bytes += size_of(part)
        self._more.set()


def _part(number: int, answer: Answer) -> Part:
    if answer.HasField("columns"):
        return ColumnPart(number, answer, answer.ByteSize())
    return SequencePart(sequence=number, message=answer.SerializeToString())


# A cancelled client can look like a clean end of the stream for a moment; within this time the cancellation arrives.
_CANCELLATION_GRACE_SECONDS = 0.05


class SequenceMessage(Protocol):
    """A request of either sequence stream."""

    def WhichOneof(self, oneof_group: Literal["message"]) -> str | None:
        """Which of open, step and finish is set."""


MessageT = TypeVar("MessageT", bound=SequenceMessage)


async def opening(requests: AsyncIterator[MessageT]) -> MessageT:
    """The first message of a stream, which must open a sequence.

    Raises:
        InvalidRequestError: the stream is empty, or begins with something else.
    """
    async for request in requests:
        if (kind := request.WhichOneof("message")) != "open":
            raise InvalidRequestError(
                f"the stream begins with {kind or 'an empty message'}; it must begin with open"
            )
        return request
    raise InvalidRequestError("the stream ended before it began; its first message must be open")


def _ignored(_: object) -> None:
    pass


async def steps(
    requests: AsyncIterator[MessageT], on_finish: Callable[[MessageT], None] = _ignored
) -> AsyncIterator[MessageT]:
    """The steps of an opened stream, until its Finish.

    Args:
        requests: the stream after its Open.
        on_finish: is handed the Finish.

    Raises:
        InvalidRequestError: the message is not a step, or the stream ended without a Finish.
    """
    async for request in requests:
        match request.WhichOneof("message"):
            case "step":
                yield request
            case "finish":
                on_finish(request)
                return
            case kind:
                raise InvalidRequestError(
                    f"{kind or 'an empty message'} came in an open stream; send step or finish"
                )
    await asyncio.sleep(_CANCELLATION_GRACE_SECONDS)
    raise InvalidRequestError("the stream ended without finish")


AnswerT = TypeVar("AnswerT")
PushT = TypeVar("PushT")


async def answered(
    requests: AsyncIterator[RequestT],
    answer: Callable[[RequestT], Awaitable[AnswerT | None]],
    pushed: asyncio.Queue[PushT | Exception] | None,
    translate: Callable[[PushT], AnswerT],
) -> AsyncGenerator[AnswerT]:
    """Answer one request after the other, and pass on what is pushed between them.

    Args:
        requests: The requests. The stream ends with them.
        answer: Answers a request; may return None for no answer.
        pushed: Messages to push, or an error that ends the stream; None for a stream without pushes.
        translate: Turns a pushed value into a message.

    Raises:
        Exception: An error that was pushed, or that `answer` raised.
    """
    if pushed is None:
        async for request in requests:
            if (response := await answer(request)) is not None:
                yield response
        return
    arriving, push = asyncio.ensure_future(_next(requests)), asyncio.ensure_future(pushed.get())
    try:
        while True:
            await asyncio.wait((arriving, push), return_when=asyncio.FIRST_COMPLETED)
            # Requests take precedence: they make earlier pushes obsolete.
            if arriving.done():
                if not (taken := arriving.result()):
                    return
                response = await answer(taken[0])
                arriving = asyncio.ensure_future(_next(requests))
            else:
                drafted, push = push.result(), asyncio.ensure_future(pushed.get())
                response = translate(_no_error(drafted))
            if response is not None:
                yield response
    finally:
        await _cancel(arriving, push)


def _no_error(drafted: PushT | Exception) -> PushT:
    if isinstance(drafted, Exception):
        raise drafted
    return drafted


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(requests: AsyncIterator[RequestT]) -> tuple[RequestT, ...]:
    """Return the next request; an empty tuple at the end."""
    async for request in requests:
        return (request,)
    return ()
