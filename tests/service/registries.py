"""Replica registries over fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.replicas.registry import ReplicaRegistry
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.replica import ReplicaSnapshot, ReplicaState
from tandem.rpc.addresses import Resolver
from tests.service.clients import until

SECONDS = 20.0
"""Bound on the wait for an expected change."""


def settings(
    targets: str, drafts: str | None = None, start_seconds: float = SECONDS, resolve_seconds: float = 5.0
) -> CoordinatorSettings:
    return CoordinatorSettings(
        target_address=targets,
        draft_address=drafts,
        start_timeout_seconds=start_seconds,
        resolve_interval_seconds=resolve_seconds,
        insecure=True,
        speculation_policy="fixed",
    )


@asynccontextmanager
async def started(replicas: ReplicaRegistry) -> AsyncIterator[ReplicaRegistry]:
    try:
        await replicas.start()
        yield replicas
    finally:
        await replicas.close()


def shot(replicas: ReplicaRegistry, address: str) -> ReplicaSnapshot:
    return next(each for each in replicas.snapshots() if each.address == address)


async def becomes(replicas: ReplicaRegistry, address: str, state: ReplicaState) -> ReplicaSnapshot:
    await until(lambda: shot(replicas, address).state is state, SECONDS, lambda: str(replicas.snapshots()))
    return shot(replicas, address)


def names(hosts: dict[str, list[str]]) -> Resolver:
    async def resolver(host: str, port: int) -> list[str]:
        if host not in hosts:
            raise OSError(-2, "no such name")
        return hosts[host]

    return resolver
