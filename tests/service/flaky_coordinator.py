"""Both Python clients as one callable, and a coordinator that fails in a scripted way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection
from pydantic import SecretStr

from tandem.client import Client, Completed
from tandem.serving.interceptors import Context, RunningCalls
from tandem.serving.server import new_server
from tandem.settings import ServerSettings
from tandem.sync_client import SyncClient
from tandem.types import Chunk, FinishReason, SpeculationStats, Summary
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem.wire.generation import chunk_to_proto
from tandem.wire.status import Ending
from tests.generate_only import GenerateOnly
from tests.service.fakes import serving

SECONDS = 20.0


TOKEN = "a-token-of-many-characters"


BOTH = pytest.mark.parametrize("kind", ["async", "sync"])


UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


Complete = Callable[..., Any]
"""`complete` of either client, as something to await."""


def completer(kind: str, address: str, **options: Any) -> Complete:
    """`complete` of the async client, or of its twin on a thread."""

    async def complete(*arguments: Any, **values: Any) -> Completed:
        async with Client(address, **options) as client:
            return await client.complete(*arguments, **values)

    def complete_sync(*arguments: Any, **values: Any) -> Completed:
        with SyncClient(address, **options) as client:
            return client.complete(*arguments, **values)

    async def complete_on_a_thread(*arguments: Any, **values: Any) -> Completed:
        return await asyncio.to_thread(complete_sync, *arguments, **values)

    return complete if kind == "async" else complete_on_a_thread


class FlakyCoordinator(GenerateOnly):
    """A coordinator that fails with each of these status codes in turn before it answers."""

    def __init__(self, *codes: grpc.StatusCode, after: int = 0, hint: float | None = 0.05) -> None:
        self.codes = list(codes)
        self.calls = 0
        self._after = after
        self._hint = hint

    async def Generate(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.calls += 1
        if self.codes:
            code = self.codes.pop(0)
            for _ in range(self._after):
                yield chunk_to_proto(Chunk("a", (1,), (False,), (1,)))
            await context.abort(code, "later", Ending(code, "later", self._hint).metadata)
        summary = Summary(FinishReason.LENGTH, 1, 1, SpeculationStats(), "r", 1)
        yield chunk_to_proto(Chunk("a", (1,), (False,), (1,), summary))


@asynccontextmanager
async def serving_flaky(servicer: FlakyCoordinator) -> AsyncIterator[str]:
    """Serve this coordinator; yield the address."""
    async with serving(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    ) as (address, _):
        yield address


@asynccontextmanager
async def serving_with_token(servicer: FlakyCoordinator) -> AsyncIterator[str]:
    """Serve with the token required and reflection on; yield the address."""
    server = new_server(ServerSettings(auth_token=SecretStr(TOKEN)), RunningCalls())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    reflection.enable_server_reflection(["tandem.v1.GenerationService", reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
