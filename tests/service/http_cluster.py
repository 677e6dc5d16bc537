"""A coordinator over fakes with an HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.service.fakes import FakeDraft, FakeTarget, serving


@dataclass(frozen=True)
class HttpCluster:
    """The parts that tests use."""

    url: str
    http: httpx2.AsyncClient
    service: CoordinatorService
    readiness: ReadinessInterceptor
    calls: RunningCalls


@asynccontextmanager
async def http_cluster(
    target: FakeTarget, draft: FakeDraft | None = None, **options: Any
) -> AsyncIterator[HttpCluster]:
    """Run a coordinator over these fakes with an HTTP server, and connect a client to it."""
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        if draft is not None:
            options["draft_address"], _ = await stack.enter_async_context(
                serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
            )
        settings: Any = {"http_port": 0} | options
        service = CoordinatorService(CoordinatorSettings(target_address=target_address, **settings))
        readiness, calls = ReadinessInterceptor(""), RunningCalls()
        service.open_other_endpoints(readiness, calls)
        await service.start()
        stack.push_async_callback(service.close)
        url = service.http_url
        assert url is not None
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=30.0))
        yield HttpCluster(url, http, service, readiness, calls)
