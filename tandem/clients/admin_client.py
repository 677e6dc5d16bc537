"""The Python client for administration, on which `tandem admin` is built.

async with AdminClient("127.0.0.1:50051") as admin:
    status = await admin.status()
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.clients.client import DEFAULT_ADDRESS, CoordinatorClient, coordinator_errors
from tandem.errors import DeadlineError, ServiceUnavailableError
from tandem.model.admin import ConfigOption, Diagnosis, RequestReport, Stats, Status
from tandem.model.replica import ReplicaSnapshot
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.v1 import admin_pb2
from tandem.v1.admin_pb2_grpc import AdminServiceStub
from tandem.wire import admin as wire

DEFAULT_TIMEOUT_SECONDS = 10.0
"""For one call."""


class AdminClient(CoordinatorClient):
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
        """Connects on first use."""
        super().__init__(address, credentials)
        self._timeout = timeout_seconds
        self._stub = AdminServiceStub(self._channel)

    async def is_serving(self) -> bool:
        """True if the coordinator takes requests, by the standard health protocol, which needs no token."""
        check: Any = health_pb2_grpc.HealthStub(self._channel).Check
        with self._errors():
            answer = await check(health_pb2.HealthCheckRequest(), timeout=self._timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def status(self) -> Status:
        """State, load and replicas at this moment."""
        return wire.STATUS.from_proto((await self._ask("GetStatus")).status)

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        return [*map(wire.REPLICA.from_proto, (await self._ask("ListReplicas")).replicas)]

    async def drain(self, address: str, *, allow_last_target: bool = False) -> ReplicaSnapshot:
        """Send no new sequences to a replica, and let it finish its own."""
        answer = await self._ask("DrainReplica", address=address, allow_last_target=allow_last_target)
        return wire.REPLICA.from_proto(answer.replica)

    async def resume(self, address: str) -> ReplicaSnapshot:
        """Give a replica new sequences again."""
        return wire.REPLICA.from_proto((await self._ask("ResumeReplica", address=address)).replica)

    async def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""
        return [*map(wire.REQUEST.from_proto, (await self._ask("ListRequests")).requests)]

    async def request(self, request_id: str) -> RequestReport:
        """The request whose id begins like this."""
        return wire.REQUEST.from_proto((await self._ask("GetRequest", request_id=request_id)).request)

    async def abort(self, request_id: str, reason: str = "") -> RequestReport:
        """End the request whose id begins like this; its client receives the reason."""
        answer = await self._ask("AbortRequest", request_id=request_id, reason=reason)
        return wire.REQUEST.from_proto(answer.request)

    async def stats(self) -> Stats:
        """Statistics since the start."""
        return wire.STATS.from_proto((await self._ask("GetStats")).stats)

    async def watch_stats(self, interval_seconds: float = 1.0) -> AsyncGenerator[Stats]:
        """Statistics at a fixed interval, until the caller leaves the loop."""
        call = self._stub.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=interval_seconds))
        try:
            with self._errors():
                async for answer in call:
                    yield wire.STATS.from_proto(answer.stats)
        finally:
            call.cancel()

    async def config(self) -> list[ConfigOption]:
        """Every option with its value and its origin."""
        return [*map(wire.OPTION.from_proto, (await self._ask("GetConfig")).options)]

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str] = ()
    ) -> list[ConfigOption]:
        """Change options for new requests; returns the named options."""
        answer = await self._ask("UpdateConfig", values=values, reset_names=reset)
        return [*map(wire.OPTION.from_proto, answer.options)]

    async def diagnose(self) -> Diagnosis:
        """The coordinator's findings, each with what to do about it."""
        return wire.DIAGNOSIS.from_proto(await self._ask("Diagnose"))

    async def _ask(self, method: str, **fields: object) -> Any:
        request = getattr(admin_pb2, f"{method}Request")(**fields)
        with self._errors():
            return await getattr(self._stub, method)(request, timeout=self._timeout)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with coordinator_errors(self.address):
                yield
        except DeadlineError:
            raise ServiceUnavailableError(
                f"coordinator {self.address}: no answer within {self._timeout:g} s"
            ) from None
