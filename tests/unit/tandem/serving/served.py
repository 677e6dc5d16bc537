"""A server with one scripted method and all interceptors, in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.config.settings import ServerSettings
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.serving.interceptors import Context
from tandem.serving.server import Service, serve
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.service.fakes import GenerateOnly

Answer = Callable[[], AsyncIterator[generation_pb2.GenerateResponse]]
SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def says_hello() -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield generation_pb2.GenerateResponse(text="hello")


class Scripted(GenerateOnly, Service):
    """A service whose only method returns a scripted answer."""

    name = "fake"
    full_names = (SERVICE_NAME,)

    def __init__(self, answer: Answer = says_hello) -> None:
        self.answer = answer
        self.ended = 0
        """Number of calls that ended, successfully or not."""

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
    """Serve during the block, yielding the address; then drain, and assert that the server ends by itself."""
    task = asyncio.create_task(serve(ServerSettings.model_validate(options), service))
    try:
        yield await announced(capsys, "ready on ", task)
    finally:
        service.request_drain()
        await task


async def announced(
    capsys: pytest.CaptureFixture[str], mark: str, server: asyncio.Task[None] | None = None
) -> str:
    """Wait for the line with the mark, and return the address that it tells."""
    output = ""
    while mark not in output:
        assert server is None or not server.done(), "the server has ended"
        await asyncio.sleep(0.01)
        output += capsys.readouterr().out
    return output.partition(mark)[2].split()[0]


async def texts_from(address: str, credentials: Credentials = PLAIN) -> list[str]:
    """Call the method on a new connection, and return the texts."""
    async with open_channel(address, credentials=credentials) as channel:
        return await texts_on(channel)


async def texts_on(channel: grpc.aio.Channel) -> list[str]:
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    return [response.text async for response in call]


async def refusal(address: str, credentials: Credentials = PLAIN) -> grpc.aio.AioRpcError:
    """Call the method, which must be refused, and return the error."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await texts_from(address, credentials)
    return error.value


async def health_of(address: str) -> str:
    """Return the status that the standard health service reports."""
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
