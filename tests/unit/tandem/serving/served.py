"""A server with one scripted method, in the test's own loop, with whatever protects it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.serving.interceptors.handlers import Context
from tandem.serving.server import serve
from tandem.settings import ServerSettings
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.chatless import Chatless

Answer = Callable[[], AsyncIterator[generation_pb2.GenerateResponse]]
SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def says_hello() -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield generation_pb2.GenerateResponse(text="hello")


class Scripted(Chatless):
    """A service whose one method answers by a script."""

    name = "fake"
    full_names = (SERVICE_NAME,)

    def __init__(self, answer: Answer = says_hello) -> None:
        self.answer = answer
        self.request_drain: Callable[[], None]
        self.ended = 0
        """Answers that came to their end, whatever it was."""

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            async for response in self.answer():
                yield response
        finally:
            self.ended += 1


@asynccontextmanager
async def running(
    service: Scripted, capsys: pytest.CaptureFixture[str], **options: object
) -> AsyncIterator[str]:
    """Serve until the block ends: the address."""
    task = asyncio.create_task(serve(ServerSettings.model_validate(options), service))
    said = ""
    while "ready on" not in said:
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
        said += capsys.readouterr().out
    try:
        yield said.partition("ready on ")[2].split()[0]
    finally:
        service.request_drain()
        assert await task


async def said_by(address: str, credentials: Credentials = PLAIN) -> list[str]:
    """What the method says on a connection of its own."""
    async with open_channel(address, credentials=credentials) as channel:
        return await said_on(channel)


async def said_on(channel: grpc.aio.Channel) -> list[str]:
    """What the method says on a channel."""
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    return [response.text async for response in call]


async def refusal(address: str, credentials: Credentials = PLAIN) -> grpc.aio.AioRpcError:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await said_by(address, credentials)
    return error.value


async def health_of(address: str, credentials: Credentials = PLAIN) -> str:
    """What the standard health service says."""
    async with open_channel(address, credentials=credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
