"""One sequence's line to a service: on a stream of its own, or on one that it shares (`coordinator.shared_stream`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.channels import ending_of, failure
from tandem.errors import ProtocolError, TandemError
from tandem.traffic import Traffic
from tandem.wire.status import Ending

_FINISH_SECONDS = 0.5
"""How long a service may take to let go of a sequence before it is dropped. The end of a request waits for it."""

UNREADABLE = "its answer cannot be read; it must be the protobuf of the method"
"""What to say of bytes that are no message."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class Message(Protocol):
    """What is said of a sequence."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


AnswerT = TypeVar("AnswerT")


class Lane(ABC, Generic[AnswerT]):
    """Carries what is said of one sequence, and what is answered. It must be cancelled in the end, whatever happens."""

    def __init__(self, service: str, read: Callable[[bytes], AnswerT], traffic: Traffic | None) -> None:
        """Begin.

        Args:
            service: What the service is called in errors.
            read: Reads an answer.
            traffic: Where to count; None: nobody asks.
        """
        self._service = service
        self._read = read
        self._traffic = traffic or Traffic()
        self.was_sent = False
        """Whether the service may have seen something of it."""

    async def ask(self, *messages: Message) -> AnswerT:
        """Send these, and wait for the answer to the last.

        Raises:
            TandemError: the service has ended the sequence, or its answer cannot be read.
        """
        await self._send([self._counted(message) for message in messages])
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
        """Send these. What becomes of them, `_receive` tells."""

    @abstractmethod
    async def _receive(self) -> bytes:
        """The next answer.

        Raises:
            TandemError: there is none, because the service has ended the sequence.
        """

    def _counted(self, message: Message) -> bytes:
        content = message.SerializeToString()
        self._traffic.sent_bytes += len(content)
        self._traffic.sent_messages += 1
        return content

    def _failure(self, ending: Ending) -> TandemError:
        return failure(self._service, ending)


class OwnStream(Lane[AnswerT]):
    """A sequence alone on a stream."""

    def __init__(
        self, service: str, call: Call, read: Callable[[bytes], AnswerT], traffic: Traffic | None
    ) -> None:
        super().__init__(service, read, traffic)
        self._call = call
        self.is_over = False
        """Whether it was cancelled."""

    def cancel(self) -> None:
        """A call that is dropped without this is never collected."""
        self._call.cancel()
        self.is_over = True

    async def _send(self, contents: Sequence[bytes]) -> None:
        try:
            for content in contents:
                await self._call.write(content)
            self.was_sent = True
        except asyncio.InvalidStateError:
            pass  # the service has ended the stream already; reading tells how
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
