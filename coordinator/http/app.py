"""Routes, the page, and the checks that every request passes first."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from coordinator.admin.plain import plain
from coordinator.http import openapi
from coordinator.http.api import Api
from coordinator.http.chat import Chats
from coordinator.http.errors import HttpError, error_response
from coordinator.requests.runner import RequestRunner
from coordinator.settings.coordinator import CoordinatorSettings
from tandem import __version__
from tandem.admin import Status
from tandem.errors import ServiceUnavailableError
from tandem.rpc.addresses import is_loopback
from tandem.serving import protection
from tandem.serving.interceptors import RunningCalls

_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/code.js": ("code.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/docs.css": ("docs.css", "text/css; charset=utf-8"),
}
_PAGE_HEADERS = {
    # The pages load nothing from elsewhere, and nothing that they show can run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

# A load balancer has no token, and the page asks for one.
HEALTH_PATHS = frozenset({"/health", "/ping"})
_OPEN_PATHS = frozenset({*HEALTH_PATHS, "/openapi.json", "/docs", *_PAGE_FILES})

REQUEST_ID_HEADER = b"x-request-id"
"""A client's own name for a request, of which the answer repeats 256 bytes; OpenAI's clients show it with errors."""

# RFC 9110 7.2: a name or an address, and perhaps a port. A URL's parser would also take user@name and name#fragment.
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::[0-9]*)?")


class App:
    """The whole of the HTTP side, as an ASGI application."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        completions: RequestRunner,
        chats: Chats,
        status: Callable[[], Awaitable[Status]],
        metrics: Callable[[], Awaitable[tuple[bytes, str] | None]],
        calls: RunningCalls,
    ) -> None:
        """Set up the endpoints. `metrics` returns Prometheus's text form and its content type; None when none are
        collected."""
        self._calls = calls
        self._chats = chats
        self._status = status
        self._metrics = metrics
        self._metric_names = settings.metric_names
        self._known_tokens = protection.token_source(settings, settings.http_host)
        self._local_only = is_loopback(settings.http_host) and not settings.knows_callers
        self._files = {path: (openapi.PAGE / name).read_bytes() for path, (name, _) in _PAGE_FILES.items()}
        api = Api(completions, chats, calls, settings)
        self._router = Router(
            [
                Route("/v1/completions", api.completions, methods=["POST"]),
                Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
                Route("/v1/responses", api.responses, methods=["POST"]),
                Route("/v1/models", api.models),
                Route("/v1/models/{name:path}", api.model),
                Route("/tokenize", api.tokenize, methods=["POST"]),
                Route("/detokenize", api.detokenize, methods=["POST"]),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/load", self._load),
                Route("/openapi.json", self._openapi),
                Route("/docs", self._docs),
                Route("/version", self._version),
                Route("/metrics", self._metrics_text),
                Route("/tandem/status", self._page_status),
                *(Route(path, self._page_file) for path in _PAGE_FILES),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Any error is answered in OpenAI's form."""
        if scope["type"] != "http":
            return
        has_begun = False
        named = dict(scope["headers"]).get(REQUEST_ID_HEADER, b"")[:256]
        request_id = named or uuid.uuid4().hex.encode()

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER, request_id)]
            await send(message)

        try:
            self._admit(scope)
            # With an app in its scope the router raises errors that it would otherwise answer as plain text.
            state = {"client_request_id": named.decode("latin-1")}
            await self._router({**scope, "app": self, "state": state}, receive, noted)
        except asyncio.CancelledError:
            # The server closes. Such a request waits for its body or for a turn, and no drain counts it.
            if not has_begun:
                error = ServiceUnavailableError("the coordinator is shutting down; send the request again")
                await error_response(error)(scope, receive, noted)
        except HTTPException as error:
            refusal = HttpError(error.status_code, f"there is nothing at {scope['path']}", "not_found")
            if error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "")
                sentence = f"method is {scope['method']}; {scope['path']} takes {allowed}"
                refusal = HttpError(405, sentence, headers=error.headers)
            await error_response(refusal)(scope, receive, noted)
        except Exception as error:  # noqa: BLE001 - an unexpected error is logged, and answered with an id
            await error_response(error)(scope, receive, noted)

    def _admit(self, scope: Scope) -> None:
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
        protection.authorize(protection.Scope.CLIENT, authorization, self._known_tokens())
        if self._calls.closed_because:
            raise ServiceUnavailableError(self._calls.closed_because)

    async def _health(self, request: Request) -> Response:
        if self._calls.closed_because:
            return JSONResponse({"status": "unavailable", "reason": self._calls.closed_because}, 503)
        return JSONResponse({"status": "ok"})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.description())

    async def _docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.page(), headers=_PAGE_HEADERS)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _load(self, request: Request) -> Response:
        """`GET /load`, as in vLLM: how many requests the server has."""
        load = (await self._status()).load
        return JSONResponse({"server_load": load.running + load.queued})

    async def _metrics_text(self, request: Request) -> Response:
        metrics = await self._metrics()
        if metrics is None:
            raise HttpError(404, "no metrics are collected here", "not_found")
        content, media_type = metrics
        if self._metric_names == "vllm":
            from tandem.telemetry.names import text_as_vllm  # only where metrics are collected

            content = text_as_vllm(content)
        return Response(content, media_type=media_type)

    async def _page_status(self, request: Request) -> Response:
        # The decisions may be hundreds, and the page asks often.
        status = plain(replace(await self._status(), decisions=()))
        template = self._chats.template
        status |= {"chat": template is not None, "instruct": template is not None and template.is_instruct}
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    async def _page_file(self, request: Request) -> Response:
        path = request.url.path
        return Response(self._files[path], media_type=_PAGE_FILES[path][1], headers=_PAGE_HEADERS)


def _check_host(host: str) -> None:
    """Refuse web pages whose own name points to this machine (DNS rebinding)."""
    spelled = _HOST.fullmatch(host)
    if spelled is None or not is_loopback(spelled["name"] or spelled["ipv6"]):
        raise HttpError(
            403,
            f"host is {host or 'not set'}; it must be this machine, which alone is served: localhost or 127.0.0.1",
        )
