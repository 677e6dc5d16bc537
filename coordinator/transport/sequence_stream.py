"""The stream of one sequence to a service: dedicated, or multiplexed with others (`multiplexed_stream`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import ProtocolError, TandemError
from tandem.rpc.channels import Traffic, ending_of, failure
from tandem.wire.columns import Arrived
from tandem.wire.status import Ending

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
