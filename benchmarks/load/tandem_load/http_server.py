"""OpenAI's API of any server over HTTP: its models, its events, and its errors in Tandem's words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

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


async def first_model(http: httpx2.AsyncClient, base: str) -> str:
    """Name of the first model that the server at http://HOST:PORT/v1 lists."""
    url = base + "/models"
    with errors_of(url, http.timeout.read):
        answer = await http.get(url)
    raise_for(answer, url)
    try:
        listed = [str(each["id"]) for each in answer.json()["data"]]
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"{url}: the answer is no list of models") from None
    if not listed:
        raise NotFoundError(f"{base} lists no model")
    return listed[0]


def event_of(line: str) -> dict[str, Any]:
    """The JSON object of a line of server-sent events (WHATWG HTML, 9.2), as OpenAI's API has them; empty for a line
    without one."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return {}
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ProtocolError(f"an event of a completion is no JSON object: {data[:300]!r}")
    return event


@contextmanager
def errors_of(url: str, timeout_seconds: float | None = None) -> Iterator[None]:
    """Say in Tandem's errors why a server cannot be reached."""
    try:
        yield
    except httpx2.ReadTimeout:
        raise DeadlineError(f"{url}: no answer within {timeout_seconds} s") from None
    except httpx2.RemoteProtocolError as error:
        raise ProtocolError(f"{url} does not speak HTTP/1.1, or closed the connection: {error}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServiceUnavailableError(
            f"{url} cannot be reached: {str(error) or type(error).__name__}"
        ) from None


_KINDS: Mapping[int, type[TandemError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    405: NotFoundError,
    408: DeadlineError,
    429: CapacityError,
    502: ServiceUnavailableError,
    503: ServiceUnavailableError,
    504: DeadlineError,
}


def raise_for(answer: httpx2.Response, url: str) -> None:
    """For any answer but a 200, raise the error of the status's kind, with the server's own words."""
    status = answer.status_code
    if status == 200:
        return
    kind = _KINDS.get(status, TandemError if status >= 500 else InvalidRequestError)
    is_lost = status == 404 and "/v1/" not in url
    hint = " (OpenAI's API is usually at a URL that ends in /v1)" if is_lost else ""
    try:
        words = words_of(answer.json())
    except ValueError:
        words = answer.text
    told = f": {' '.join(words.split())[:300]}" if words else ""
    raise kind(f"{url} answered {status}{hint}{told}")


def words_of(answer: Any) -> str:
    """The message of an error in OpenAI's form, vLLM's older one, or any other."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
