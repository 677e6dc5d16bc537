"""Both ends of a stream, over a target that echoes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from benchmarks.load.fakes import FakeTarget, LeaveError
from coordinator.transport.streams import Method, Streams
from tandem.errors import TandemError
from tandem.rpc.channels import Traffic, open_channel
from tandem.serving.interceptors import Context
from tandem.types import Delta, RowKind, SamplingParams, TargetOptions, Verification, VerifyStep
from tandem.v1 import target_pb2, target_pb2_grpc
from tandem.wire import target as wire
from target_service.servicer import VerifiedFor
from tests.service.fakes import refusal, serving

SECONDS = 20.0
HOLD, REFUSE, FAIL, LEAVE = 1001, 1002, 1003, 1004
"""Steps that are answered late, or not at all."""
OPTIONS = TargetOptions("r", SamplingParams())


class Echo(FakeTarget):
    """Answers each step with its base length, except for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.messages: list[int] = []
        """Number of steps of each message."""
        self.released = asyncio.Event()

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        self.calls["sequences"] += 1
        self.running += 1
        try:
            async for step in sequence.steps():
                match step.delta.base_length:
                    case 1001:
                        await self.released.wait()
                    case 1002:
                        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    case 1003:
                        raise ValueError("a secret")
                    case 1004:
                        raise LeaveError
                await sequence.answer(Verification(step.delta.base_length, ()))
            self.finished += 1
        except LeaveError:
            pass
        finally:
            self.running -= 1

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        self.calls["streams"] += 1

        async def observed() -> AsyncIterator[target_pb2.VerifyRequest]:
            async for request in request_iterator:
                self.messages.append(len(request.steps.records) // 24)
                yield request

        async for response in super().Verify(observed(), context):
            yield response


class Asker:
    """The coordinator's end of a sequence."""

    def __init__(self, streams: Streams[Any, wire.Answer], traffic: Traffic | None = None) -> None:
        self.stream = streams.sequence(self, traffic)
        self._answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._error: TandemError | None = None
        self._is_open = False

    async def ask(self, base_length: int) -> int:
        """The length that answers a step with this one."""
        if self._error is not None:
            raise self._error
        if not self._is_open:
            self.stream.send(OPTIONS)
        self._is_open = True
        self._answer = asyncio.get_running_loop().create_future()
        self.stream.send(step(base_length))
        return await self._answer

    def take(self, answer: wire.Answer) -> None:
        """See `Listener`."""
        if not self._answer.done():
            self._answer.set_result(answer.base_length)

    def fail(self, error: TandemError) -> None:
        """See `Listener`."""
        self._error = self._error or error
        if self._is_open and not self._answer.done():
            self._answer.set_exception(self._error)


@dataclass(frozen=True)
class Ends:
    """Both ends of the streams."""

    service: Echo
    method: Method[Any, wire.Answer]
    streams: Streams[Any, wire.Answer]
    stub: target_pb2_grpc.TargetServiceStub
    server: grpc.aio.Server
    address: str

    def sequences(self, count: int) -> list[Asker]:
        """Begin so many sequences."""
        return [Asker(self.streams) for _ in range(count)]


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    service = Echo()
    async with (
        asyncio.timeout(SECONDS),
        serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)) as (
            address,
            server,
        ),
        open_channel(address) as channel,
    ):
        method: Method[Any, wire.Answer] = Method(
            service="target service",
            open=channel.stream_stream("/tandem.v1.TargetService/Verify"),
            write=wire.requests_to_proto,
            size=wire.request_size,
            read=lambda content: wire.answers_from_proto(target_pb2.VerifyResponse.FromString(content)),
        )
        stub = target_pb2_grpc.TargetServiceStub(channel)
        yield Ends(service, method, Streams(method), stub, server, address)


def step(base_length: int) -> VerifyStep:
    return VerifyStep(Delta(base_length, ()), RowKind.TOKEN, 0)


def asking(*steps: tuple[int, int], opens: bool = True) -> target_pb2.VerifyRequest:
    """A message that opens sequences and asks: pairs of a sequence and its step's base length."""
    opened = [(number, OPTIONS) for number in dict.fromkeys(number for number, _ in steps)]
    return wire.requests_to_proto(
        [*(opened if opens else ()), *((number, step(length)) for number, length in steps)]
    )


async def read(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse], count: int
) -> dict[int, Any]:
    """Return the next answers by sequence, from any number of messages."""
    found: dict[int, Any] = {}
    while len(found) < count:
        response = await call.read()
        assert isinstance(response, target_pb2.VerifyResponse)
        found |= dict(wire.answers_from_proto(response))
    return found
