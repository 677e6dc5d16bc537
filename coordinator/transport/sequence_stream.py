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
from tandem.rpc.channels import ending_of, failure
from tandem.rpc.traffic import Traffic
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
        self.was_sent = False
        """True if the service may have received a message of the sequence."""

    async def ask(self, *messages: Message) -> AnswerT:
        """Send these, and wait for the answer to the last.

        Raises:
            TandemError: the service has ended the sequence, or its answer cannot be read.
        """
        await self.send(*messages)
        return await self.receive()

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
        content = await self._receive()
        self._traffic.received_bytes += len(content)
        self._traffic.received_messages += 1
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
    async def _receive(self) -> bytes:
        """The next answer.

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
