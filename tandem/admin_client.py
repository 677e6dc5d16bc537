"""The Python client for administration, on which `tandem admin` is built.

async with AdminClient("127.0.0.1:50051") as admin:
    status = await admin.status()
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.admin import ConfigOption, Diagnosis, RequestReport, Stats, Status
from tandem.client import DEFAULT_ADDRESS, coordinator_errors
from tandem.errors import DeadlineError, ServiceUnavailableError
from tandem.replica import ReplicaSnapshot
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.v1 import admin_pb2
from tandem.v1.admin_pb2_grpc import AdminServiceStub
from tandem.wire import admin as wire

DEFAULT_TIMEOUT_SECONDS = 10.0


class AdminClient:
    """Calls a coordinator's AdminService.

    Every method raises a `TandemError`: ServiceUnavailableError without an answer in time, NotFoundError and
    InvalidRequestError for wrong names and values, UnauthenticatedError and PermissionDeniedError for a wrong token.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: Credentials = PLAIN,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Connects on first use.

        Args:
            address: host:port of the coordinator.
            credentials: How to connect; an admin token among them where the coordinator has one.
            timeout_seconds: How long one call may take.
        """
        self.address = address
        self._timeout = timeout_seconds
        self._channel = open_channel(address, credentials=credentials)
        self._stub = AdminServiceStub(self._channel)

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def is_serving(self) -> bool:
        """True if the coordinator takes requests, by the standard health protocol, which needs no token."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        answer = await self._ask(check, health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def status(self) -> Status:
        """State, load and replicas at this moment."""
        answer = await self._ask(self._stub.GetStatus, admin_pb2.GetStatusRequest())
        return wire.status_from_proto(answer.status)

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        answer = await self._ask(self._stub.ListReplicas, admin_pb2.ListReplicasRequest())
        return [*map(wire.replica_from_proto, answer.replicas)]

    async def drain(self, address: str, *, allow_last_target: bool = False) -> ReplicaSnapshot:
        """Send no new sequences to a replica, and let it finish its own."""
        answer = await self._ask(
            self._stub.DrainReplica,
            admin_pb2.DrainReplicaRequest(address=address, allow_last_target=allow_last_target),
        )
        return wire.replica_from_proto(answer.replica)

    async def resume(self, address: str) -> ReplicaSnapshot:
        """Give a replica new sequences again."""
        answer = await self._ask(self._stub.ResumeReplica, admin_pb2.ResumeReplicaRequest(address=address))
        return wire.replica_from_proto(answer.replica)

    async def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""
        answer = await self._ask(self._stub.ListRequests, admin_pb2.ListRequestsRequest())
        return [*map(wire.request_from_proto, answer.requests)]

    async def request(self, request_id: str) -> RequestReport:
        """The request whose id begins like this."""
        answer = await self._ask(self._stub.GetRequest, admin_pb2.GetRequestRequest(request_id=request_id))
        return wire.request_from_proto(answer.request)

    async def abort(self, request_id: str, reason: str = "") -> RequestReport:
        """End the request whose id begins like this; its client receives the reason."""
        answer = await self._ask(
            self._stub.AbortRequest, admin_pb2.AbortRequestRequest(request_id=request_id, reason=reason)
        )
        return wire.request_from_proto(answer.request)

    async def stats(self) -> Stats:
        """Statistics since the start."""
        answer = await self._ask(self._stub.GetStats, admin_pb2.GetStatsRequest())
        return wire.stats_from_proto(answer.stats)

    async def watch_stats(self, interval_seconds: float = 1.0) -> AsyncGenerator[Stats]:
        """Statistics at a fixed interval, until the caller leaves the loop."""
        call = self._stub.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=interval_seconds))
        try:
            with self._errors():
                async for answer in call:
                    yield wire.stats_from_proto(answer.stats)
        finally:
            call.cancel()

    async def config(self) -> list[ConfigOption]:
        """Every option with its value and its origin."""
        answer = await self._ask(self._stub.GetConfig, admin_pb2.GetConfigRequest())
        return [*map(wire.option_from_proto, answer.options)]

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str] = ()
    ) -> list[ConfigOption]:
        """Change options for new requests; returns the named options."""
        answer = await self._ask(
            self._stub.UpdateConfig, admin_pb2.UpdateConfigRequest(values=values, reset_names=reset)
        )
        return [*map(wire.option_from_proto, answer.options)]

    async def diagnose(self) -> Diagnosis:
        """The coordinator's findings, each with what to do about it."""
        answer = await self._ask(self._stub.Diagnose, admin_pb2.DiagnoseRequest())
        return wire.diagnosis_from_proto(answer)

    async def _ask(self, method: Any, request: object) -> Any:
        with self._errors():
            return await method(request, timeout=self._timeout)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with coordinator_errors(self.address):
                yield
        except DeadlineError:
            raise ServiceUnavailableError(
                f"coordinator {self.address}: no answer within {self._timeout:g} s"
            ) from None
