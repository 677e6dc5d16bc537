"""AdminService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc.aio

from coordinator.admin.administration import Administrator
from tandem.serving.interceptors import Context
from tandem.v1 import admin_pb2 as pb
from tandem.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from tandem.wire import admin as wire

_CALLS: Mapping[str, tuple[Callable[[Administrator, Any, str], Awaitable[Any]], Any]] = {
    "GetStatus": (lambda admin, request, by: admin.status(), wire.STATUS),
    "ListReplicas": (lambda admin, request, by: admin.replicas(), wire.REPLICA),
    "DrainReplica": (
        lambda admin, request, by: admin.drain(
            request.address, allow_last_target=request.allow_last_target, by=by
        ),
        wire.REPLICA,
    ),
    "ResumeReplica": (lambda admin, request, by: admin.resume(request.address, by=by), wire.REPLICA),
    "ListRequests": (lambda admin, request, by: admin.requests(), wire.REQUEST),
    "GetRequest": (lambda admin, request, by: admin.request(request.request_id), wire.REQUEST),
    "AbortRequest": (
        lambda admin, request, by: admin.abort(request.request_id, reason=request.reason, by=by),
        wire.REQUEST,
    ),
    "GetStats": (lambda admin, request, by: admin.stats(), wire.STATS),
    "GetConfig": (lambda admin, request, by: admin.config(), wire.OPTION),
    "UpdateConfig": (
        lambda admin, request, by: admin.update_config(
            dict(sorted(request.values.items())), list(request.reset_names), by=by
        ),
        wire.OPTION,
    ),
}
"""By call: what it asks of the administrator for its caller (`by`), and the form of what it finds."""


def caller(context: Context) -> str:
    """The caller, as far as known: the name in its certificate, if any, and its address."""
    address = unquote(context.peer() or "").partition(":")[2]
    names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
    return f"{names[0]} from {address}" if names else address


class AdminServicer:
    """Shows and steers the coordinator: `_CALLS`, and the two calls of another form."""

    def __init__(self, administration: Administrator, caller_of: Callable[[Context], str] = caller) -> None:
        self._administration = administration
        self._caller = caller_of
        for name in _CALLS:
            setattr(self, name, self._handler(name))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer AdminService."""
        add_AdminServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    def _handler(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        (ask, form), response = _CALLS[name], getattr(pb, f"{name}Response")
        (field,) = response.DESCRIPTOR.fields_by_name

        async def handle(request: Any, context: Context) -> Any:
            found = await ask(self._administration, request, self._caller(context))
            answer = map(form.to_proto, found) if isinstance(found, list) else form.to_proto(found)
            return response(**{field: answer})

        return handle

    async def WatchStats(
        self, request: pb.WatchStatsRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatsResponse]:
        """Statistics at a fixed interval."""
        # The proto names the second
        interval = request.interval_seconds or 1.0
        async with aclosing(self._administration.watch(interval)) as watch:
            async for stats in watch:
                yield pb.WatchStatsResponse(stats=wire.STATS.to_proto(stats))

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:
        """Findings, each with what to do about it."""
        return wire.DIAGNOSIS.to_proto(await self._administration.diagnose())
