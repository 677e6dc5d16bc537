"""Names of several replicas: addresses are found, drained and dropped without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from coordinator.replicas.registry import ReplicaRegistry
from tandem.replica import ReplicaState, Role
from tandem.v1 import target_pb2_grpc
from tests.service.clients import until
from tests.service.fakes import FakeTarget
from tests.service.registries import SECONDS, becomes, names, settings, shot, started
from tests.service.served import Served, served


async def test_a_name_stands_for_all_of_its_addresses() -> None:
    """Loopback has many addresses, so one port on several of them is several replicas of one name."""
    hosts = {"targets": ["127.0.0.1"]}
    async with served(FakeTarget()) as (first,):
        second_server = grpc.aio.server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(FakeTarget(), second_server)
        answering = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(answering, second_server)
        second_server.add_insecure_port(f"127.0.0.2:{first.port}")
        await second_server.start()
        chosen = ReplicaRegistry(
            settings(f"targets:{first.port}", resolve_seconds=0.1), resolver=names(hosts)
        )
        async with started(chosen) as replicas:
            assert [each.address for each in replicas.snapshots()] == [first.address]
            hosts["targets"] = ["127.0.0.1", "127.0.0.2"]
            added = f"127.0.0.2:{first.port}"
            await until(lambda: replicas.targets.member(added) is not None, SECONDS)
            await becomes(replicas, added, ReplicaState.READY)

            member = replicas.targets.member(first.address)
            assert member is not None
            member.open_sequences = 1
            hosts["targets"] = ["127.0.0.2"]
            gone = await becomes(replicas, first.address, ReplicaState.DRAINING)
            assert "no longer stands for" in gone.reason
            await asyncio.sleep(0.5)
            assert replicas.targets.member(first.address) is member, "a sequence is still open there"
            member.open_sequences = 0
            await until(lambda: replicas.targets.member(first.address) is None, SECONDS)

            del hosts["targets"]
            await asyncio.sleep(0.5)
            assert shot(replicas, added).state is ReplicaState.READY, (
                "an unreachable name server must end nothing"
            )
        with suppress(asyncio.CancelledError):
            await second_server.stop(None)


@asynccontextmanager
async def named(target: Served) -> AsyncIterator[tuple[ReplicaRegistry, list[str]]]:
    """A registry that resolves the target's name on demand, and the hosts of that name."""
    hosts = ["127.0.0.1"]
    given = settings(f"targets:{target.port}", resolve_seconds=3600.0)
    async with started(ReplicaRegistry(given, resolver=names({"targets": hosts}))) as replicas:
        yield replicas, hosts


async def test_an_operators_drain_survives_a_missing_dns_record() -> None:
    async with served(FakeTarget()) as (target,), named(target) as (replicas, hosts):

        async def go_and_come_back() -> None:
            hosts.clear()
            await replicas.targets.look()
            await replicas.targets.look()
            assert replicas.targets.member(target.address) is None
            hosts.append("127.0.0.1")
            await replicas.targets.look()
            member = replicas.targets.member(target.address)
            assert member is not None
            await until(lambda: member.model is not None, SECONDS)

        replicas.drain(Role.TARGET, target.address)
        reason = shot(replicas, target.address).reason
        await go_and_come_back()
        assert (await becomes(replicas, target.address, ReplicaState.DRAINING)).reason == reason
        assert replicas.targets.choose() is None
        replicas.resume(Role.TARGET, target.address)
        await go_and_come_back()
        await becomes(replicas, target.address, ReplicaState.READY)


async def test_a_replica_missing_from_dns_once_is_kept() -> None:
    async with served(FakeTarget()) as (target,), named(target) as (replicas, hosts):
        member = replicas.targets.member(target.address)
        assert member is not None
        replicas.drain(Role.TARGET, target.address)
        for _ in range(2):
            hosts.clear()
            await replicas.targets.look()
            assert replicas.targets.member(target.address) is member
            replicas.resume(Role.TARGET, target.address)
            assert "no longer stands for" in shot(replicas, target.address).reason
            hosts.append("127.0.0.1")
            await replicas.targets.look()
            assert replicas.targets.member(target.address) is member
            assert member.is_ready
        hosts.clear()
        await replicas.targets.look()
        await replicas.targets.look()
        assert replicas.targets.member(target.address) is None
