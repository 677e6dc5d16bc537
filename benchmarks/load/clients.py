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
from tandem.client import Client, Retries
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)
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


_ERRORS: dict[int, type[TandemError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: DeadlineError,
    429: CapacityError,
    502: ServiceUnavailableError,
    503: ServiceUnavailableError,
    504: DeadlineError,
}
_MAX_WORDS = 300
"""Characters of an error that are shown."""
_DATA = "data:"


def origin_of(url: str) -> str:
    """The address of an OpenAI-compatible server, without `/v1` at its end.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL()
    if (
        parts.scheme not in ("http", "https")
        or not parts.host
        or parts.userinfo
        or parts.query
        or parts.fragment
    ):
        raise ValueError(f"{url!r} must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


async def served_model(origin: str, token: str = "") -> str:
    """Name of the first model that a server lists.

    Raises:
        ServiceUnavailableError: the server cannot be reached.
        TandemError: it refuses, or lists no model.
    """
    async with _client(origin, token) as client:
        try:
            response = await client.get("/v1/models")
        except httpx2.HTTPError as error:
            raise _failure(origin, error) from None
    if not response.is_success:
        raise _refusal(origin, response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ProtocolError(f"{origin}/v1/models lists no model; name one with --model") from None


def _client(origin: str, token: str) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = httpx2.Timeout(None, connect=10.0)
    return httpx2.AsyncClient(base_url=origin, headers=headers, timeout=timeout, trust_env=False)


@asynccontextmanager
async def http_connection(origin: str, model: str, token: str = "") -> AsyncIterator[Connection]:
    """Connect to an OpenAI-compatible server."""
    async with _client(origin, token) as client:
        yield _HttpConnection(client, origin, model)


class _HttpConnection:
    def __init__(self, client: httpx2.AsyncClient, origin: str, model: str) -> None:
        self._client = client
        self._origin = origin
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
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(self._origin, response)
                async for event in _events(response):
                    if "error" in event:
                        raise TandemError(f"{self._origin} ended a completion: {_words(event)}")
                    if any(choice.get("text") for choice in event.get("choices") or ()):
                        served.chunks.append(time.perf_counter())
                    usage = (event.get("usage") or {}).get("completion_tokens", usage)
        except httpx2.HTTPError as error:
            raise _failure(self._origin, error) from None
        served.output_tokens = len(served.chunks) if usage is None else usage


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events (WHATWG HTML, 9.2), each on one line as OpenAI's API has them."""
    async for line in response.aiter_lines():
        if not line.startswith(_DATA) or (data := line.removeprefix(_DATA).strip()) == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ProtocolError(f"an event of a completion is no JSON object: {data[:_MAX_WORDS]!r}")
        yield event


def _failure(origin: str, error: httpx2.HTTPError) -> TandemError:
    if isinstance(error, httpx2.RemoteProtocolError):
        return ProtocolError(f"{origin} does not speak HTTP/1.1, or closed the connection: {error}")
    what = "cannot connect to" if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else "lost"
    return ServiceUnavailableError(f"{what} {origin}: {str(error) or type(error).__name__}")


def _refusal(origin: str, response: httpx2.Response) -> TandemError:
    others = TandemError if response.is_server_error else InvalidRequestError
    try:
        words = _words(response.json())
    except ValueError:
        words = response.text
    told = f": {words[:_MAX_WORDS]}" if words else ""
    return _ERRORS.get(response.status_code, others)(f"{origin} answered {response.status_code}{told}")


def _words(answer: Any) -> str:
    """The message of an error in OpenAI's form, vLLM's older one, or any other."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
