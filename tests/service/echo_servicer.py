"""Both ends of shared streams, over a target that echoes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.transport.streams import (
    DedicatedStream,
    Methods,
    MultiplexedSequence,
    SequenceStream,
    StreamChoice,
)
from tandem.rpc.channels import open_channel
from tandem.serving.interceptors import Context
from tandem.v1 import target_pb2, target_pb2_grpc
from tandem.v1.types_pb2 import SequencePart
from tests.service.fakes import FakeTarget, refusal, serving

SECONDS = 20.0
HOLD, REFUSE, FAIL, LEAVE = 1001, 1002, 1003, 1004
"""Steps that are answered late."""


class Echo(FakeTarget):
    """Answers each step with its base length, except for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.messages: list[int] = []
        """Number of parts of each message of a shared stream."""
        self.released = asyncio.Event()

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        has_begun = False
        try:
            async for request in request_iterator:
                if not has_begun:
                    has_begun = True
                    self.calls["sequences"] += 1
                    self.running += 1
                if request.HasField("finish"):
                    self.finished += 1
                    return
                match request.step.delta.base_length:
                    case 1001:
                        await self.released.wait()
                    case 1002:
                        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    case 1003:
                        raise ValueError("a secret")
                    case 1004:
                        return
                yield target_pb2.VerifyResponse(base_length=request.step.delta.base_length)
        finally:
            self.running -= has_begun

    async def VerifyMany(
        self, request_iterator: AsyncIterator[target_pb2.VerifyManyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyManyResponse]:
        self.calls["shared streams"] += 1

        async def observed() -> AsyncIterator[target_pb2.VerifyManyRequest]:
            async for request in request_iterator:
                self.messages.append(len(request.parts))
                yield request

        async for response in super().VerifyMany(observed(), context):
            yield response


@dataclass(frozen=True)
class Ends:
    """Both ends of the streams."""

    service: Echo
    methods: Methods[target_pb2.VerifyResponse]
    streams: StreamChoice[target_pb2.VerifyResponse]
    stub: target_pb2_grpc.TargetServiceStub
    server: grpc.aio.Server
    address: str

    def sequences(self, count: int) -> list[SequenceStream[target_pb2.VerifyResponse]]:
        """Open one sequence on a dedicated stream, and this many on a shared one."""
        alone, *shared = [self.streams.stream() for _ in range(count + 1)]
        assert isinstance(alone, DedicatedStream)
        assert all(isinstance(sequence, MultiplexedSequence) for sequence in shared)
        return shared


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
        stub = target_pb2_grpc.TargetServiceStub(channel)
        methods = Methods(
            service="target service",
            open_one=channel.stream_stream("/tandem.v1.TargetService/Verify"),
            read=target_pb2.VerifyResponse.FromString,
            open_many=channel.stream_stream("/tandem.v1.TargetService/VerifyMany"),
            message=lambda parts: target_pb2.VerifyManyRequest(parts=parts),
            read_many=target_pb2.VerifyManyResponse.FromString,
        )
        yield Ends(service, methods, StreamChoice(methods), stub, server, address)


def step(base_length: int) -> target_pb2.VerifyRequest:
    request = target_pb2.VerifyRequest()
    request.step.delta.base_length = base_length
    return request


async def answer_to(sequence: SequenceStream[target_pb2.VerifyResponse], base_length: int) -> int:
    return (await sequence.ask(step(base_length))).base_length


async def read(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyManyRequest, target_pb2.VerifyManyResponse], count: int
) -> list[SequencePart]:
    """Return the next parts, from any number of messages."""
    parts: list[SequencePart] = []
    while len(parts) < count:
        response = await call.read()
        assert isinstance(response, target_pb2.VerifyManyResponse)
        parts += response.parts
    return sorted(parts, key=lambda part: part.sequence)
