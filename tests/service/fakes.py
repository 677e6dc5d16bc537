"""Fake services without a model on real gRPC servers, and a real coordinator in front of them.

The target counts: n + 1 follows n. The draft counts along, unless a test gives it another rule.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import SecretStr

from benchmarks.load.fakes import MAX_LENGTH, Fake, FakeDraft, FakeTarget, counting, scripted
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.errors import (
    CapacityError,
    InvalidRequestError,
    ServiceUnavailableError,
    TandemError,
    status_code,
)
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import new_server
from tandem.serving.streams import AnswerT, OptionsT, ServedSequence, StepT
from tandem.settings import ServerSettings
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc

__all__ = ["MAX_LENGTH", "Fake", "FakeDraft", "FakeTarget", "counting", "scripted"]


def refusal(code: grpc.StatusCode, sentence: str) -> TandemError:
    """Return the error that ends a sequence with this status."""
    meanings = (CapacityError, InvalidRequestError, ServiceUnavailableError)
    errors = (meaning(sentence) for meaning in meanings)
    return next(error for error in errors if status_code(error) is code)


def hooked(
    sequence: ServedSequence[OptionsT, StepT, AnswerT],
    on_step: Callable[[StepT], None] = lambda _: None,
    on_answer: Callable[[AnswerT], AnswerT] = lambda answer: answer,
) -> ServedSequence[OptionsT, StepT, AnswerT]:
    """Pass the steps of a sequence, and its answers and pushes, through these functions."""
    steps, say = sequence.steps, sequence.say

    async def observed(pushed: Any = None) -> AsyncIterator[StepT]:
        async for step in steps(pushed):
            on_step(step)
            yield step

    vars(sequence).update(steps=observed, say=lambda answer: say(on_answer(answer)))
    return sequence


@asynccontextmanager
async def serving(
    register: Callable[[grpc.aio.Server], None],
    *interceptors: grpc.aio.ServerInterceptor,
    auth_token: str | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """Run a ready server with these servicers; yield its address and the server."""
    token = None if auth_token is None else SecretStr(auth_token)
    server = new_server(ServerSettings(auth_token=token), RunningCalls(), *interceptors)
    register(server)
    ready = health.aio.HealthServicer()
    await ready.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)


@asynccontextmanager
async def coordinator(settings: CoordinatorSettings) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """Run a coordinator with these settings; yield its address and the service."""
    service = CoordinatorService(settings)
    await service.start()
    try:
        async with serving(service.register, *service.interceptors) as (address, _):
            yield address, service
    finally:
        await service.close()


@asynccontextmanager
async def coordinating(settings: CoordinatorSettings) -> AsyncIterator[str]:
    """Run a coordinator with these settings; yield its address."""
    async with coordinator(settings) as (address, _):
        yield address


@asynccontextmanager
async def cluster(
    target: FakeTarget, draft: FakeDraft | None, patience_seconds: float = 30.0
) -> AsyncIterator[Client]:
    """A client of a coordinator over these fakes."""
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address = None
        if draft is not None:
            draft_address, _ = await stack.enter_async_context(
                serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
            )
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=patience_seconds,
            speculation_policy="fixed",
        )
        address = await stack.enter_async_context(coordinating(settings))
        yield await stack.enter_async_context(Client(address))
