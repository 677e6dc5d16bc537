"""Clients of a load: Tandem's over gRPC, or OpenAI's completions over HTTP, streamed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from benchmarks.load.figures import Served
from tandem.audit.client import first_model, raise_for, reached, words_of
from tandem.client import Client, Retries
from tandem.errors import ProtocolError, TandemError
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A completion that a client asks for."""

    prompt: tuple[int, ...]
    output_tokens: int
    """Its length: the end-of-sequence token does not end it."""
    temperature: float


class Connection(Protocol):
    """A client's connection, which has at most one request at once."""

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """Read a completion to its end, and note in `served` when its chunks come and how many tokens it has.

        Raises:
            TandemError: it failed.
        """


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Makes a client's connection."""


@asynccontextmanager
async def grpc_connection(address: str, credentials: Credentials = PLAIN) -> AsyncIterator[Connection]:
    """Connect to a coordinator at host:port."""
    # An answer that comes at the second attempt would hide the refusal of the first.
    async with Client(address, credentials, retries=Retries(attempts=1)) as client:
        yield _GrpcConnection(client)


class _GrpcConnection:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def complete(self, request: LoadRequest, served: Served) -> None:
        wanted = GenerationRequest(
            request.prompt, max_tokens=request.output_tokens, temperature=request.temperature, ignore_eos=True
        )
        async for chunk in self._client.generate(wanted):
            if chunk.token_ids:
                served.chunks.append(time.perf_counter())
                served.output_tokens += len(chunk.token_ids)


def base_of(url: str) -> str:
    """The base of an OpenAI-compatible server's paths, which ends in `/v1`.

    Raises:
        ValueError: it is no URL of a server.
    """
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL()
    others = parts.userinfo or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.host or others:
        raise ValueError("it must be http://HOST:PORT or https://HOST:PORT")
    return f"{url.rstrip('/').removesuffix('/v1')}/v1"


def _client(token: str) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(None, connect=10.0), trust_env=False)


async def served_model(base: str, token: str = "") -> str:
    """Name of the first model that a server lists.

    Raises:
        TandemError: the server cannot be reached, refuses, or lists no model.
    """
    async with _client(token) as client:
        return await first_model(client, base)


@asynccontextmanager
async def http_connection(base: str, model: str, token: str = "") -> AsyncIterator[Connection]:
    """Connect to an OpenAI-compatible server."""
    async with _client(token) as client:
        yield _HttpConnection(client, f"{base}/completions", model)


class _HttpConnection:
    def __init__(self, client: httpx2.AsyncClient, url: str, model: str) -> None:
        self._client = client
        self._url = url
        self._model = model

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """See `Connection`. A server that reports no usage is counted a token for each chunk."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": request.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: int | None = None
        with reached(self._url):
            async with self._client.stream("POST", self._url, json=body) as response:
                if not response.is_success:
                    await response.aread()
                raise_for(response, self._url)
                async for event in _events(response):
                    if "error" in event:
                        raise TandemError(f"{self._url} ended a completion: {words_of(event)}")
                    if any(choice.get("text") for choice in event.get("choices") or ()):
                        served.chunks.append(time.perf_counter())
                    usage = (event.get("usage") or {}).get("completion_tokens", usage)
        served.output_tokens = len(served.chunks) if usage is None else usage


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events (WHATWG HTML, 9.2), each on one line as OpenAI's API has them."""
    async for line in response.aiter_lines():
        if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ProtocolError(f"an event of a completion is no JSON object: {data[:300]!r}")
        yield event
