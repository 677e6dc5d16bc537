"""A coordinator over fakes with an HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from tandem.engine.models.loading import LoadedModel
from tandem.serving.interceptors import RunningCalls
from tandem_coordinator.service import CoordinatorService
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tests.paths import DEMO_TARGET
from tests.service.engines import services
from tests.service.fakes import FakeDraft, FakeTarget, served, settings_for, settings_over

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
SECONDS = 20.0


def text(first: int, last: int) -> str:
    decoded: str = TOKENIZER.decode(list(range(first, last + 1)))
    return decoded


def openai(cluster: HttpCluster, **changes: Any) -> AsyncOpenAI:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": SECONDS} | changes
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", **options)


async def post(
    cluster: HttpCluster, path: str = "/v1/completions", **body: Any
) -> tuple[int, dict[str, Any]]:
    answer = await cluster.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]


@dataclass(frozen=True)
class HttpCluster:
    url: str
    http: httpx2.AsyncClient
    service: CoordinatorService
    calls: RunningCalls


@asynccontextmanager
async def http_cluster(
    target: FakeTarget, draft: FakeDraft | None = None, **options: Any
) -> AsyncIterator[HttpCluster]:
    """Run a coordinator over these fakes with an HTTP server, and connect a client to it."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(served(*([target] if draft is None else [target, draft])))
        settings = settings_over(services, **({"http_port": 0} | options))
        yield await stack.enter_async_context(http_coordinator(settings))


@asynccontextmanager
async def http_coordinator(settings: CoordinatorSettings) -> AsyncIterator[HttpCluster]:
    """Run a coordinator with an HTTP server, and connect a client to it."""
    async with AsyncExitStack() as stack:
        service = CoordinatorService(settings)
        calls = RunningCalls()
        service.open_other_endpoints(calls)
        await service.start()
        stack.push_async_callback(service.close)
        assert service.http is not None
        url = service.http.url
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=30.0))
        yield HttpCluster(url, http, service, calls)


@asynccontextmanager
async def api(
    target_model: LoadedModel, draft_model: LoadedModel, template: Path, **options: Any
) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of a coordinator over services with these models."""
    own: dict[str, Any] = {"http_port": 0, "chat_template": template, "served_model_name": "m"}
    async with (
        services(target_model, draft_model) as addresses,
        http_coordinator(settings_for(*addresses, **(own | options))) as cluster,
        openai(cluster, timeout=120.0) as client,
    ):
        yield client


MakeApi = Callable[..., AbstractAsyncContextManager[AsyncOpenAI]]
"""`api` of certain models."""
