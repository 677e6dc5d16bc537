"""The Python client for administration, on which `tandem admin` is built.

async with AdminClient("127.0.0.1:50051") as admin:
    status = await admin.status()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.clients.client import DEFAULT_ADDRESS, CoordinatorClient, coordinator_errors
from tandem.clients.weights_client import CHANGE_TIMEOUT_SECONDS, WeightsClient
from tandem.errors import DeadlineError, NotFoundError, ServiceUnavailableError, TandemError
from tandem.model.admin import ConfigOption, Diagnosis, RequestReport, Stats, Status
from tandem.model.replica import ReplicaSnapshot, Role
from tandem.model.types import InFlight, Weights
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
        self._versions: dict[Role, int] = {}
        """Versions of weights that were given to the replicas of a role. The coordinator learns of them later."""

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

    async def load_weights(
        self,
        role: Role | str,
        path: str,
        *,
        replicas: Collection[str] = (),
        in_flight: InFlight | str = InFlight.FINISH,
        services: Credentials = PLAIN,
        timeout_seconds: float = CHANGE_TIMEOUT_SECONDS,
    ) -> dict[str, Weights]:
        """Replace the weights of targets or drafts, each of which is called directly, at the address at which the
        coordinator finds it; returns the new ones by address. They get one version. Raises when any replica refuses;
        that one serves its old weights, and the sentence says which have the new ones.

        Args:
            role: target or draft.
            path: Folder on the services' machines, absolute or relative to the root that their operators named.
            replicas: Addresses of those that load them; by default all of the role.
            in_flight: What becomes of open sequences: finish, abort or restart.
            services: With an admin token of the services, which the coordinator need not have.
            timeout_seconds: For each replica.
        """
        shots = await self._of_role(role, ())
        known = [shot.model.weights.version for shot in shots if shot.model and shot.model.weights]
        version = 1 + max(*known, self._versions.get(Role(role), 0), 0)
        chosen = await self._of_role(role, replicas)
        self._versions[Role(role)] = version
        return await _for_each(
            chosen,
            lambda client: client.load_weights(path, in_flight, version),
            services,
            timeout_seconds,
        )

    async def sleep(
        self,
        role: Role | str,
        level: int = 1,
        *,
        replicas: Collection[str] = (),
        in_flight: InFlight | str = InFlight.FINISH,
        services: Credentials = PLAIN,
        timeout_seconds: float = CHANGE_TIMEOUT_SECONDS,
    ) -> dict[str, Weights]:
        """Free memory of targets or drafts until `wake_up`; see `load_weights` and `WeightsClient.sleep`."""
        chosen = await self._of_role(role, replicas)
        return await _for_each(
            chosen, lambda client: client.sleep(level, in_flight), services, timeout_seconds
        )

    async def wake_up(
        self,
        role: Role | str,
        *,
        replicas: Collection[str] = (),
        services: Credentials = PLAIN,
        timeout_seconds: float = CHANGE_TIMEOUT_SECONDS,
    ) -> dict[str, Weights]:
        """Let targets or drafts serve again; see `load_weights`."""
        chosen = await self._of_role(role, replicas)
        return await _for_each(chosen, WeightsClient.wake_up, services, timeout_seconds)

    async def _of_role(self, role: Role | str, addresses: Collection[str]) -> list[ReplicaSnapshot]:
        """The replicas of a role at these addresses, or all of them."""
        wanted = Role(role)
        shots = [shot for shot in await self.replicas() if shot.role is wanted]
        known = {shot.address: shot for shot in shots}
        unknown = [address for address in addresses if address not in known]
        if unknown or not shots:
            missing = f"there is no {wanted.value} replica" + (f" {unknown[0]!r}" if unknown else "")
            raise NotFoundError(f"{missing}; there are: {', '.join(known) or 'none'}")
        return [known[address] for address in addresses] or shots

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


async def _for_each(
    replicas: Sequence[ReplicaSnapshot],
    ask: Callable[[WeightsClient], Awaitable[Weights]],
    credentials: Credentials,
    timeout_seconds: float,
) -> dict[str, Weights]:
    """Ask replicas at once, and wait for all."""

    async def ask_one(address: str) -> Weights:
        async with WeightsClient(address, credentials, timeout_seconds) as client:
            return await ask(client)

    found = await asyncio.gather(*(ask_one(shot.address) for shot in replicas), return_exceptions=True)
    done: dict[str, Weights] = {}
    errors: list[BaseException] = []
    for shot, result in zip(replicas, found, strict=True):
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            done[shot.address] = result
    if not errors:
        return done
    first = errors[0]
    if not isinstance(first, TandemError):
        raise first
    sentences = "; ".join(str(error) for error in errors)
    raise type(first)(f"{sentences}; done at: {', '.join(done)}" if done else sentences)
