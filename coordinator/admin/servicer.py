"""AdminService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from urllib.parse import unquote

import grpc.aio

from coordinator.admin.administration import Administrator
from tandem.serving.interceptors import Context
from tandem.v1 import admin_pb2
from tandem.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from tandem.wire import admin as wire

_DEFAULT_INTERVAL_SECONDS = 1.0


def caller(context: Context) -> str:
    """The caller, as far as known: the name in its certificate, if any, and its address."""
    address = unquote(context.peer() or "").partition(":")[2]
    names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
    return f"{names[0]} from {address}" if names else address


class AdminServicer(AdminServiceServicer):
    """Shows and steers the coordinator."""

    def __init__(self, administration: Administrator, caller_of: Callable[[Context], str] = caller) -> None:
        self._administration = administration
        self._caller = caller_of

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer AdminService."""
        add_AdminServiceServicer_to_server(self, server)

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """State, load and replicas."""
        return admin_pb2.GetStatusResponse(status=wire.status_to_proto(await self._administration.status()))

    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, context: Context
    ) -> admin_pb2.ListReplicasResponse:
        """List every replica."""
        replicas = await self._administration.replicas()
        return admin_pb2.ListReplicasResponse(replicas=map(wire.replica_to_proto, replicas))

    async def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, context: Context
    ) -> admin_pb2.DrainReplicaResponse:
        """Drain a replica."""
        replica = await self._administration.drain(
            request.address, allow_last_target=request.allow_last_target, by=self._caller(context)
        )
        return admin_pb2.DrainReplicaResponse(replica=wire.replica_to_proto(replica))

    async def ResumeReplica(
        self, request: admin_pb2.ResumeReplicaRequest, context: Context
    ) -> admin_pb2.ResumeReplicaResponse:
        """Give a replica new sequences again."""
        replica = await self._administration.resume(request.address, by=self._caller(context))
        return admin_pb2.ResumeReplicaResponse(replica=wire.replica_to_proto(replica))

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """List the requests that run."""
        requests = await self._administration.requests()
        return admin_pb2.ListRequestsResponse(requests=map(wire.request_to_proto, requests))

    async def GetRequest(
        self, request: admin_pb2.GetRequestRequest, context: Context
    ) -> admin_pb2.GetRequestResponse:
        """Find a request by the beginning of its id."""
        found = await self._administration.request(request.request_id)
        return admin_pb2.GetRequestResponse(request=wire.request_to_proto(found))

    async def AbortRequest(
        self, request: admin_pb2.AbortRequestRequest, context: Context
    ) -> admin_pb2.AbortRequestResponse:
        """End a request."""
        ended = await self._administration.abort(
            request.request_id, reason=request.reason, by=self._caller(context)
        )
        return admin_pb2.AbortRequestResponse(request=wire.request_to_proto(ended))

    async def GetStats(
        self, request: admin_pb2.GetStatsRequest, context: Context
    ) -> admin_pb2.GetStatsResponse:
        """Statistics since the start."""
        return admin_pb2.GetStatsResponse(stats=wire.stats_to_proto(await self._administration.stats()))

    async def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.WatchStatsResponse]:
        """Statistics at a fixed interval."""
        interval = request.interval_seconds or _DEFAULT_INTERVAL_SECONDS
        async with aclosing(self._administration.watch(interval)) as watch:
            async for stats in watch:
                yield admin_pb2.WatchStatsResponse(stats=wire.stats_to_proto(stats))

    async def GetConfig(
        self, request: admin_pb2.GetConfigRequest, context: Context
    ) -> admin_pb2.GetConfigResponse:
        """List every option."""
        options = await self._administration.config()
        return admin_pb2.GetConfigResponse(options=map(wire.option_to_proto, options))

    async def UpdateConfig(
        self, request: admin_pb2.UpdateConfigRequest, context: Context
    ) -> admin_pb2.UpdateConfigResponse:
        """Change options for new requests."""
        options = await self._administration.update_config(
            dict(sorted(request.values.items())), list(request.reset_names), by=self._caller(context)
        )
        return admin_pb2.UpdateConfigResponse(options=map(wire.option_to_proto, options))

    async def Diagnose(
        self, request: admin_pb2.DiagnoseRequest, context: Context
    ) -> admin_pb2.DiagnoseResponse:
        """Findings, each with what to do about it."""
        return wire.diagnosis_to_proto(await self._administration.diagnose())
