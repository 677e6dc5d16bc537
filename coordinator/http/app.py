"""What is answered at which path, and what every request passes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

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
from tandem.serving.protection import is_loopback

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
        *,
        local_only: bool,
    ) -> None:
        """Answer what `shown` can.

        Args:
            shown: What the endpoints stand on.
            gate: Says why nothing is let through at the moment.
            calls: Counts the completions that run, for a drain.
            known_tokens: Tells the tokens that are known by now.
            model_name: Name of the model; None for its own.
            most_body_bytes: Most bytes of a request's body.
            local_only: Whether only this machine is to reach it, and nobody has to show a token.
        """
        self._gate = gate
        self._local_only = local_only
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
        headers = dict(scope["headers"])
        if self._local_only:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in _OPEN_PATHS:
            return
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


def _check_host(host: str) -> None:
    """Refuse a page of the web that has its own name point to this machine, to read what it may not (DNS rebinding)."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
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
