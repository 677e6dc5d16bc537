"""What is answered at which path, and what every request passes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from coordinator.http.api import Backend, OpenAIApi
from coordinator.http.errors import HttpError, error_response
from coordinator.http.pages import PATHS, Pages
from tandem import __version__
from tandem.errors import ServiceUnavailableError
from tandem.serving import tokens
from tandem.serving.calls import RunningCalls
from tandem.serving.gate import Gate

# A load balancer has no token, and the page asks for one.
_OPEN_PATHS = frozenset({"/health", *PATHS})


class Shown(Backend, Protocol):
    """What is shown beside completions."""

    def status(self) -> dict[str, Any]:
        """What the page shows."""

    @property
    def metrics(self) -> Callable[[], tuple[bytes, str] | None]:
        """Tells the metrics in Prometheus's text form, and its content type; None when none are collected."""


class App:
    """The whole of the HTTP side, as an ASGI application."""

    def __init__(
        self,
        shown: Shown,
        gate: Gate,
        calls: RunningCalls,
        known_tokens: Callable[[], tokens.Tokens],
        model_name: str | None,
        most_body_bytes: int,
    ) -> None:
        self._gate = gate
        self._shown = shown
        self._known_tokens = known_tokens
        api, pages = OpenAIApi(shown, calls, model_name, most_body_bytes), Pages()
        self._router = Router(
            [
                Route("/v1/completions", api.completions, methods=["POST"]),
                Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
                Route("/v1/models", api.models),
                Route("/v1/models/{name:path}", api.model),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/tandem/status", self._status),
                *(Route(path, pages.file) for path in PATHS),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever is raised is answered in OpenAI's form."""
        if scope["type"] != "http":
            return
        try:
            self._admit(scope)
            # With an app in its scope the router raises what it would else answer as plain text.
            await self._router({**scope, "app": self}, receive, send)
        except HTTPException as error:
            await error_response(_of_router(error, scope))(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is logged, and answered with an id
            await error_response(error)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Let the request through, or raise why not."""
        path = scope["path"]
        if path in _OPEN_PATHS:
            return
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1") or None
        tokens.authorize(tokens.Scope.CLIENT, authorization, self._known_tokens())
        if self._gate.closed_because:
            raise ServiceUnavailableError(self._gate.closed_because)

    async def _health(self, request: Request) -> Response:
        if self._gate.closed_because:
            return JSONResponse({"status": "unavailable", "reason": self._gate.closed_because}, 503)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        metrics = self._shown.metrics()
        if metrics is None:
            raise HttpError(404, "no metrics are collected here", "not_found")
        content, media_type = metrics
        return Response(content, media_type=media_type)

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self._shown.status(), headers={"Cache-Control": "no-store"})


def _of_router(error: HTTPException, scope: Scope) -> HttpError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"method is {scope['method']}; {scope['path']} takes {allowed}", headers=error.headers
        )
    return HttpError(error.status_code, f"there is nothing at {scope['path']}", "not_found")
