"""The coordinator's status for the page: models, replicas, load, and speculation statistics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from coordinator.http import openapi
from coordinator.http.api import Backend, OpenAIApi, Tokenization
from coordinator.http.bodies import HttpMemory, UnknownFields
from coordinator.http.chat import Chats, ChatTemplate
from coordinator.http.errors import HttpError, error_response
from coordinator.http.responses import Responses
from coordinator.requests.plan import Models
from coordinator.requests.runner import RequestRunner, Turns
from coordinator.settings.coordinator import RequestBounds
from coordinator.stats.speculation import describe
from tandem import __version__
from tandem.admin import Status
from tandem.errors import ServiceUnavailableError
from tandem.replica import ReplicaSnapshot, Role
from tandem.rpc.addresses import is_loopback
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.protection import Scope as TokenScope
from tandem.serving.protection import Tokens, authorize


def status_object(status: Status, *, chat: bool) -> dict[str, Any]:
    """The coordinator's status as an object for JSON.

    Args:
        status: The coordinator's status.
        chat: Whether the model has a chat template.
    """
    settings = status.settings
    return {
        "version": status.version,
        "state": status.state.value,
        "uptime_seconds": round(status.uptime_seconds, 3),
        "model": status.model,
        "chat": chat,
        "load": {"running": status.load.running, "queued": status.load.queued},
        "tokens_per_second": round(status.throughput.last_10_seconds, 3),
        "speculation": {
            "is_on": settings.is_on,
            "num_speculative_tokens": settings.num_speculative_tokens,
            **describe(status.speculation),
            "state": status.speculation_state.as_dict(),
        },
        "replicas": [
            _replica(replica)
            for replica in sorted(status.replicas, key=lambda one: (one.role is not Role.TARGET, one.address))
        ],
    }


def _replica(replica: ReplicaSnapshot) -> dict[str, Any]:
    model = replica.model
    return {
        "role": replica.role.value,
        "address": replica.address,
        "state": replica.state.value,
        "reason": replica.reason,
        "since_seconds": round(replica.since_seconds, 3),
        "open_sequences": replica.open_sequences,
        "round_trip_seconds": replica.round_trip_seconds,
        "step_seconds": replica.step_seconds,
        "model": None
        if model is None
        else {
            "name": model.name,
            "architecture": model.architecture,
            "parameter_count": model.parameter_count,
            "dtype": model.dtype,
        },
    }


_FOLDER = Path(__file__).with_name("page")

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "code.js": ("code.js", "text/javascript; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}

PATHS = tuple(f"/{name}" for name in _FILES)

_HEADERS = {
    # The page loads nothing from elsewhere, and nothing that it shows can run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Pages:
    """The files, read once."""

    def __init__(self) -> None:
        self._contents = {
            f"/{path}": ((_FOLDER / name).read_bytes(), media_type)
            for path, (name, media_type) in _FILES.items()
        }

    async def file(self, request: Request) -> Response:
        """`GET` of one of them."""
        content, media_type = self._contents[request.url.path]
        return Response(content, media_type=media_type, headers=_HEADERS)


# A load balancer has no token, and the page asks for one.
_OPEN_PATHS = frozenset({"/health", "/ping", "/openapi.json", "/docs", *PATHS})

# RFC 9110 7.2: a name or an address, and perhaps a port. A URL's parser would also take user@name and name#fragment.
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::[0-9]*)?")


class CoordinatorBackend:
    """The coordinator behind HTTP."""

    def __init__(
        self,
        completions: RequestRunner,
        status: Callable[[], Awaitable[Status]],
        chats: Chats,
        metrics: Callable[[], Awaitable[tuple[bytes, str] | None]],
    ) -> None:
        self.completions = completions
        self._chats = chats
        self.metrics = metrics
        """Returns the metrics in Prometheus's text form and its content type; None when none are collected."""
        self._status = status

    @property
    def models(self) -> Models:
        """The models that complete requests."""
        return self.completions.models

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Makes a prompt of a chat; None when the model has no template."""
        return self._chats.template

    @property
    def turns(self) -> Turns:
        """Large bodies take turns to be parsed."""
        return self.completions.turns

    @property
    def bounds(self) -> RequestBounds:
        """Bounds of a request."""
        return self.completions.bounds

    async def status(self) -> dict[str, Any]:
        """The page's data."""
        return status_object(await self._status(), chat=self.chat_template is not None)


class Shown(Backend, Protocol):
    """Routes beside those for completions."""

    async def status(self) -> dict[str, Any]:
        """The page's data."""

    @property
    def metrics(self) -> Callable[[], Awaitable[tuple[bytes, str] | None]]:
        """Returns the metrics in Prometheus's text form and its content type; None when none are collected."""


class App:
    """The whole of the HTTP side, as an ASGI application."""

    def __init__(
        self,
        shown: Shown,
        readiness: ReadinessInterceptor,
        calls: RunningCalls,
        known_tokens: Callable[[], Tokens],
        model_name: str | None,
        memory: HttpMemory,
        *,
        unknown_fields: UnknownFields,
        local_only: bool,
    ) -> None:
        """Set up the endpoints.

        Args:
            shown: The parts of the coordinator that the endpoints use.
            readiness: Says why no request is admitted at the moment.
            calls: Counts the running completions, for a drain.
            known_tokens: Returns the currently valid tokens.
            model_name: Name of the model; None for its own.
            memory: Bounds of what requests and answers hold.
            unknown_fields: Reads bodies.
            local_only: Whether the server is for this machine alone, without a token.
        """
        self._readiness = readiness
        self._local_only = local_only
        self._shown = shown
        self._known_tokens = known_tokens
        api = OpenAIApi(shown, calls, model_name, memory, unknown_fields)
        pages, tokenization = Pages(), Tokenization(api)
        self._router = Router(
            [
                Route("/v1/completions", api.completions, methods=["POST"]),
                Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
                Route("/v1/responses", Responses(api).create, methods=["POST"]),
                Route("/v1/models", api.models),
                Route("/v1/models/{name:path}", api.model),
                Route("/tokenize", tokenization.tokenize, methods=["POST"]),
                Route("/detokenize", tokenization.detokenize, methods=["POST"]),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/load", self._load),
                Route("/openapi.json", openapi.document),
                Route("/docs", openapi.page),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/tandem/status", self._status),
                *(Route(path, pages.file) for path in PATHS),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Any error is answered in OpenAI's form."""
        if scope["type"] != "http":
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._admit(scope)
            # With an app in its scope the router raises errors that it would otherwise answer as plain text.
            await self._router({**scope, "app": self}, receive, noted)
        except asyncio.CancelledError:
            # The server closes. Such a request waits for its body or for a turn, and no drain counts it.
            if not has_begun:
                error = ServiceUnavailableError("the coordinator is shutting down; send the request again")
                await error_response(error)(scope, receive, send)
        except HTTPException as error:
            await error_response(_of_router(error, scope))(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - an unexpected error is logged, and answered with an id
            await error_response(error)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Let the request through, or raise why not."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # RFC 9112 6.1: a proxy may have seen another end of such a request, and the rest of the
            # connection may be part of it.
            raise HttpError(
                400,
                "content-length and transfer-encoding are both set; a request must have one of them",
                headers={"Connection": "close"},
            )
        if self._local_only:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in _OPEN_PATHS:
            return
        authorization = headers.get(b"authorization", b"").decode("latin-1") or None
        authorize(TokenScope.CLIENT, authorization, self._known_tokens())
        if self._readiness.closed_because:
            raise ServiceUnavailableError(self._readiness.closed_because)

    async def _health(self, request: Request) -> Response:
        if self._readiness.closed_because:
            return JSONResponse({"status": "unavailable", "reason": self._readiness.closed_because}, 503)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _load(self, request: Request) -> Response:
        """`GET /load`, as in vLLM: how many requests the server has."""
        load = (await self._shown.status())["load"]
        return JSONResponse({"server_load": load["running"] + load["queued"]})

    async def _metrics(self, request: Request) -> Response:
        metrics = await self._shown.metrics()
        if metrics is None:
            raise HttpError(404, "no metrics are collected here", "not_found")
        content, media_type = metrics
        return Response(content, media_type=media_type)

    async def _status(self, request: Request) -> Response:
        return JSONResponse(await self._shown.status(), headers={"Cache-Control": "no-store"})


def _check_host(host: str) -> None:
    """Refuse web pages whose own name points to this machine (DNS rebinding)."""
    spelled = _HOST.fullmatch(host)
    if spelled is None or not is_loopback(spelled["name"] or spelled["ipv6"]):
        raise HttpError(
            403,
            f"host is {host or 'not set'}; it must be this machine, which alone is served: localhost or 127.0.0.1",
        )


def _of_router(error: HTTPException, scope: Scope) -> HttpError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"method is {scope['method']}; {scope['path']} takes {allowed}", headers=error.headers
        )
    return HttpError(error.status_code, f"there is nothing at {scope['path']}", "not_found")
