"""AdminService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from urllib.parse import unquote

import grpc.aio

from coordinator.admin.administration import Administrator
from tandem.serving.interceptors import Context
from tandem.v1 import admin_pb2 as pb
from tandem.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from tandem.wire import admin as wire


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

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """State, load and replicas."""
        return pb.GetStatusResponse(status=wire.STATUS.to_proto(await self._administration.status()))

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Context
    ) -> pb.ListReplicasResponse:
        """List every replica."""
        replicas = await self._administration.replicas()
        return pb.ListReplicasResponse(replicas=map(wire.REPLICA.to_proto, replicas))

    async def DrainReplica(
        self, request: pb.DrainReplicaRequest, context: Context
    ) -> pb.DrainReplicaResponse:
        """Drain a replica."""
        replica = await self._administration.drain(
            request.address, allow_last_target=request.allow_last_target, by=self._caller(context)
        )
        return pb.DrainReplicaResponse(replica=wire.REPLICA.to_proto(replica))

    async def ResumeReplica(
        self, request: pb.ResumeReplicaRequest, context: Context
    ) -> pb.ResumeReplicaResponse:
        """Give a replica new sequences again."""
        replica = await self._administration.resume(request.address, by=self._caller(context))
        return pb.ResumeReplicaResponse(replica=wire.REPLICA.to_proto(replica))

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        """List the requests that run."""
        requests = await self._administration.requests()
        return pb.ListRequestsResponse(requests=map(wire.REQUEST.to_proto, requests))

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:
        """Find a request by the beginning of its id."""
        found = await self._administration.request(request.request_id)
        return pb.GetRequestResponse(request=wire.REQUEST.to_proto(found))

    async def AbortRequest(
        self, request: pb.AbortRequestRequest, context: Context
    ) -> pb.AbortRequestResponse:
        """End a request."""
        ended = await self._administration.abort(
            request.request_id, reason=request.reason, by=self._caller(context)
        )
        return pb.AbortRequestResponse(request=wire.REQUEST.to_proto(ended))

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Statistics since the start."""
        return pb.GetStatsResponse(stats=wire.STATS.to_proto(await self._administration.stats()))

    async def WatchStats(
        self, request: pb.WatchStatsRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatsResponse]:
        """Statistics at a fixed interval."""
        # The proto names the second
        interval = request.interval_seconds or 1.0
        async with aclosing(self._administration.watch(interval)) as watch:
            async for stats in watch:
                yield pb.WatchStatsResponse(stats=wire.STATS.to_proto(stats))

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigResponse:
        """List every option."""
        options = await self._administration.config()
        return pb.GetConfigResponse(options=map(wire.OPTION.to_proto, options))

    async def UpdateConfig(
        self, request: pb.UpdateConfigRequest, context: Context
    ) -> pb.UpdateConfigResponse:
        """Change options for new requests."""
        options = await self._administration.update_config(
            dict(sorted(request.values.items())), list(request.reset_names), by=self._caller(context)
        )
        return pb.UpdateConfigResponse(options=map(wire.OPTION.to_proto, options))

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:
        """Findings, each with what to do about it."""
        return wire.DIAGNOSIS.to_proto(await self._administration.diagnose())
