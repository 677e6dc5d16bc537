"""All replicas that the coordinator knows, of both roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import grpc.aio

from coordinator.addresses import Address, Resolver, resolve, split_addresses
from coordinator.draft_client import DraftClient
from coordinator.fleet import Fleet
from coordinator.pool import Pool
from coordinator.pool_member import ClientT, Means, Member
from coordinator.replica import ReplicaSnapshot, ReplicaState, Role
from coordinator.rules import Deployment, check_models
from coordinator.settings import CoordinatorSettings
from coordinator.target_client import TargetClient
from tandem.channels import open_channel
from tandem.credentials import PLAIN, Credentials
from tandem.errors import IncompatibleModelsError, ServiceUnavailableError

_BY_OPERATOR = "an operator drained it"

FoundT = TypeVar("FoundT", TargetClient, DraftClient)


class Replicas:
    """Both pools, and what operators may do with their members."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        credentials: Credentials = PLAIN,
        resolver: Resolver = resolve,
    ) -> None:
        self.fleet = Fleet(settings)
        self._settings = settings
        self._credentials = credentials
        self._resolver = resolver
        self.targets: Pool[TargetClient] = self._pool(Role.TARGET, settings.target_address, TargetClient)
        self.drafts: Pool[DraftClient] = self._pool(Role.DRAFT, settings.draft_address or "", DraftClient)
        """Has no members when the target works alone."""

    async def start(self) -> None:
        """Return once there is a target and, where drafts are configured, a draft that goes with it.

        Raises:
            ServiceUnavailableError: a service is not ready in time.
            IncompatibleModelsError: draft and target break a rule.
        """
        await self.targets.start()
        await self._first(self.targets)
        if self.drafts.addresses:
            await self.drafts.start()
            await self._first(self.drafts)
        else:
            assert self.fleet.target is not None
            check_models(Deployment(self._settings, self.fleet.target))

    async def close(self) -> None:
        """Let go of all of them."""
        await asyncio.gather(self.targets.close(), self.drafts.close())

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Every replica at this moment, the targets first."""
        return [*self.targets.snapshots(), *self.drafts.snapshots()]

    def drain(self, role: Role, address: str) -> None:
        """Send nothing new to a replica; what it has moves elsewhere where there is another, or stays until it ends.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        self._of(role).drain(address, _BY_OPERATOR)

    def resume(self, role: Role, address: str) -> None:
        """Send new sequences to a replica again.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        self._of(role).resume(address)

    def _of(self, role: Role) -> Pool[TargetClient] | Pool[DraftClient]:
        return self.targets if role is Role.TARGET else self.drafts

    def _pool(
        self, role: Role, addresses: str, make_client: Callable[[grpc.aio.Channel], ClientT]
    ) -> Pool[ClientT]:
        def make_member(found: str, origin: Address, changed: Callable[[], None]) -> Member[ClientT]:
            means = Means(
                role=role,
                open_channel=lambda limit: open_channel(found, limit, self._credentials_for(origin)),
                credentials_state=self._credentials.files_state,
                message_limit=lambda: self.fleet.message_limit_bytes,
                make_client=make_client,
                judge=lambda info: self.fleet.judge(role, info),
                changed=changed,
            )
            return Member(found, origin, means)

        return Pool(
            role,
            split_addresses(addresses),
            make_member,
            self._resolver,
            self._settings.resolve_interval_seconds,
        )

    def _credentials_for(self, origin: Address) -> Credentials:
        """Certificates are made out to the name that was given, not to the address that it stands for."""
        if origin.is_name and self._credentials.uses_tls and not self._credentials.server_name:
            return replace(self._credentials, server_name=origin.host)
        return self._credentials

    async def _first(self, pool: Pool[FoundT]) -> None:
        """Wait until one is ready, or is known not to go with the others."""
        seconds = self._settings.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while pool.choose() is None:
                    _refuse_incompatible(pool)
                    await pool.change()
        except TimeoutError:
            name = pool.role.value
            given = ", ".join(map(str, pool.addresses))
            raise ServiceUnavailableError(
                f"the {name} service at {given} was not ready within {seconds:g} s; "
                f"start it, or name another with --{name}-address: {pool.reasons()}"
            ) from None


def _refuse_incompatible(pool: Pool[FoundT]) -> None:
    for shot in pool.snapshots():
        if shot.state is ReplicaState.INCOMPATIBLE:
            raise IncompatibleModelsError(shot.reason)
