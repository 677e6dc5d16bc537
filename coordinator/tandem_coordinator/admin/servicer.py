"""AdminService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc.aio

from tandem.serving.interceptors import Context
from tandem.v1 import admin_pb2 as pb
from tandem.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from tandem.wire import admin as wire
from tandem_coordinator.admin.administration import Administration

_CALLS: Mapping[str, tuple[str, Any]] = {
    "GetStatus": ("status", wire.STATUS),
    "ListReplicas": ("replicas", wire.REPLICA),
    "DrainReplica": ("drain", wire.REPLICA),
    "ResumeReplica": ("resume", wire.REPLICA),
    "ListRequests": ("requests", wire.REQUEST),
    "GetRequest": ("request", wire.REQUEST),
    "AbortRequest": ("abort", wire.REQUEST),
    "GetStats": ("stats", wire.STATS),
    "GetConfig": ("config", wire.OPTION),
    "UpdateConfig": ("update_config", wire.OPTION),
}
"""By call: the administration's method, which takes the request's fields by name, and the form of what it finds."""


def caller(context: Context) -> str:
    """The caller, as far as known: the name in its certificate, if any, and its address."""
    address = unquote(context.peer() or "").partition(":")[2]
    names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
    return f"{names[0]} from {address}" if names else address


class AdminServicer:
    """Shows and steers the coordinator: `_CALLS`, and the two calls of another form."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration
        for name in _CALLS:
            setattr(self, name, self._handler(name))

    def add_to(self, server: grpc.aio.Server) -> None:
        add_AdminServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    def _handler(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        method, form = _CALLS[name]
        response = getattr(pb, f"{name}Response")
        (field,) = response.DESCRIPTOR.fields_by_name

        async def handle(request: Any, context: Context) -> Any:
            asked = {each.name: getattr(request, each.name) for each in request.DESCRIPTOR.fields}
            is_change = method in ("drain", "resume", "abort", "update_config")
            by = {"by": caller(context)} if is_change else {}
            found = await getattr(self._administration, method)(**asked, **by)
            answer = map(form.to_proto, found) if isinstance(found, list) else form.to_proto(found)
            return response(**{field: answer})

        return handle

    async def WatchStats(
        self, request: pb.WatchStatsRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatsResponse]:
        # The proto names the second
        interval = request.interval_seconds or 1.0
        async with aclosing(self._administration.watch(interval)) as watch:
            async for stats in watch:
                yield pb.WatchStatsResponse(stats=wire.STATS.to_proto(stats))

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:
        return wire.DIAGNOSIS.to_proto(await self._administration.diagnose())
