"""The service that is tested, and a stream to it on which anything can be said."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import ProtocolError
from tandem.model.types import ModelInfo
from tandem.rpc.channels import Deadline, errors_of
from tandem.wire.status import Ending
from tandem_coordinator.transport.streams import Call

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")

REFUSED = grpc.StatusCode.INVALID_ARGUMENT
PROMPT_LENGTH = 24
_MAX_LENGTH = 128
"""Longest sequence that is played, where the model reads as much."""
_SILENCE_SECONDS = 0.3
"""How long nothing may come where nothing was asked for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The service that is tested."""

    channel: grpc.aio.Channel
    model: ModelInfo
    seconds: float
    """How long an answer may take."""

    @property
    def vocabulary_size(self) -> int:
        """Bound of ids, also for a draft without a vocabulary, which proposes ids that it was sent."""
        return self.model.vocabulary_size or 1 << 20

    @property
    def max_length(self) -> int:
        return min(_MAX_LENGTH, self.model.max_length or _MAX_LENGTH)

    def prompt(self, first: int = 0) -> list[int]:
        """Tokens that repeat, so that drafts without a model have something to propose."""
        base = min(300, self.vocabulary_size // 2)
        span = self.vocabulary_size - base
        return [base + (first + number % 5) % span for number in range(PROMPT_LENGTH)]


class Conversation(ABC, Generic[RequestT, AnswerT]):
    """One stream to the service, on which requests are said as they are."""

    service: ClassVar[str]
    """As errors name it."""
    method: ClassVar[str]

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.call: Call = subject.channel.stream_stream(self.method)()
        self._arrived: defaultdict[int, deque[AnswerT | Ending | ProtocolError]] = defaultdict(deque)
        self._reading: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    @abstractmethod
    def _encode(self, requests: Iterable[tuple[int, RequestT]]) -> bytes:
        """One message with these requests."""

    @abstractmethod
    def _decode(self, content: bytes) -> Iterable[tuple[int, AnswerT | Ending | ProtocolError]]:
        """The answers in a message, each with the number of its sequence."""

    async def say(self, *requests: tuple[int, RequestT]) -> None:
        """Send requests in one message, each with the number of its sequence."""
        await self.write(self._encode(requests))

    async def write(self, message: bytes) -> None:
        with errors_of(self.service):
            await self.call.write(message)

    async def next(self, sequence: int = 1) -> AnswerT | Ending:
        """The next answer or end of a sequence."""
        seconds = self._subject.seconds
        try:
            await self._wait_for(sequence, seconds)
        except TimeoutError:
            raise ProtocolError(f"no answer to sequence {sequence} within {seconds:g} s") from None
        answer = self._arrived[sequence].popleft()
        if isinstance(answer, ProtocolError):
            raise answer
        return answer

    async def answer(self, sequence: int = 1) -> AnswerT | Ending:
        """The next answer to a request, or the end of a sequence: all that comes, unless some comes beside them."""
        return await self.next(sequence)

    async def must_end(self, what: str, sequence: int = 1, code: grpc.StatusCode = REFUSED) -> None:
        """A sequence must end because of this: a mistake, unless another code is given."""
        answer = await self.answer(sequence)
        if not isinstance(answer, Ending):
            raise ProtocolError(f"{what}: it answered sequence {sequence}, which it must end")
        check_ending(answer, what, code)

    async def must_be_silent(self, otherwise: str, sequence: int = 1) -> None:
        """Nothing more may come for a sequence."""
        with suppress(TimeoutError):
            await self._wait_for(sequence, _SILENCE_SECONDS)
        if not self.is_silent(sequence):
            raise ProtocolError(otherwise)

    def is_silent(self, sequence: int) -> bool:
        """True if nothing is there that was said of a sequence and not taken."""
        return not self._arrived[sequence]

    async def end_of_stream(self) -> grpc.StatusCode:
        """Status of the stream, which must end now."""
        deadline = Deadline(self._subject.seconds)
        try:
            with suppress(grpc.RpcError):
                while isinstance(await self._read(deadline), bytes):
                    pass
        except TimeoutError:
            raise ProtocolError(f"it did not end the stream within {self._subject.seconds:g} s") from None
        code: grpc.StatusCode = await self.call.code()
        return code

    async def _wait_for(self, sequence: int, seconds: float) -> None:
        """Read until something has come for a sequence. Raises a TimeoutError if nothing does."""
        deadline = Deadline(seconds)
        while self.is_silent(sequence):
            with errors_of(self.service):
                content = await self._read(deadline)
            if not isinstance(content, bytes):
                raise ProtocolError("it ended the stream")
            try:
                for number, answer in self._decode(content):
                    self._arrived[number].append(answer)
            except DecodeError:
                raise ProtocolError(
                    "its answer cannot be read; it must be the protobuf of the method"
                ) from None

    async def _read(self, deadline: Deadline) -> object:
        """The next message, or gRPC's mark of the stream's end.

        A read that was waited for in vain goes on: to cancel it would end the stream.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.call.read())
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=deadline.remaining_seconds)
        if not done:
            raise TimeoutError
        self._reading = None
        return reading.result()


def check_ending(ending: Ending, what: str, code: grpc.StatusCode = REFUSED) -> None:
    """The end that something had must have this status."""
    if ending.code is not code:
        raise ProtocolError(f"{what} ended with {describe_ending(ending)}; it must be {code.name}")


def describe_ending(ending: Ending) -> str:
    """The status and the sentence of an end, for errors."""
    return f"{ending.code.name} {ending.sentence}".strip()
