"""States of replicas that start, stop, drain, hang or have other models, names of several replicas, and drafts that
coordinators share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from tandem.clients.client import Client
from tandem.errors import IncompatibleModelsError, InvalidRequestError, ServiceUnavailableError
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import GenerationRequest, StepProfile, Verification, VerifyStep
from tandem.rpc.addresses import Resolver
from tandem.rpc.credentials import Credentials
from tandem.serving.interceptors import Context
from tandem_coordinator.replicas.registry import ReplicaRegistry
from tandem_coordinator.service import CoordinatorService
from tandem_draft.servicer import DraftedFor
from tests.service.clients import complete, until
from tests.service.fakes import (
    NOT_SERVING,
    SERVING,
    Fake,
    FakeDraft,
    FakeTarget,
    Served,
    addresses,
    coordinator,
    fleet,
    served,
    settings_for,
    settings_over,
)

SECONDS = 20.0
"""Bound on the wait for an expected change."""


settings = partial(settings_for, start_timeout_seconds=SECONDS, insecure=True)


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


@asynccontextmanager
async def followed(*fakes: Fake) -> AsyncIterator[tuple[ReplicaRegistry, list[Served]]]:
    """Run a registry over these fakes; yield it once one replica of each role is ready."""
    async with served(*fakes) as services:
        given = settings(addresses(services, FakeTarget), addresses(services, FakeDraft) or None)
        async with started(ReplicaRegistry(given)) as replicas:
            yield replicas, services


async def test_a_returning_replica_is_reached_with_renewed_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ca_file = tmp_path / "ca.pem"
    used = list[bytes]()

    def plain(address: str, limit: int, credentials: Credentials, _: object) -> grpc.aio.Channel:
        used.append(ca_file.read_bytes())
        return grpc.aio.insecure_channel(address)

    monkeypatch.setattr("tandem_coordinator.replicas.pool.open_channel", plain)
    ca_file.write_bytes(b"the first")
    async with served(FakeTarget()) as (target,):
        replicas = ReplicaRegistry(settings(target.address), Credentials(ca_file=ca_file))
        async with started(replicas):
            await becomes(replicas, target.address, ReplicaState.READY)
            assert set(used) == {b"the first"}
            ca_file.write_bytes(b"the renewed one")
            await target.stop()
            await becomes(replicas, target.address, ReplicaState.DOWN)
            await target.start()
            await becomes(replicas, target.address, ReplicaState.READY)
    assert used[-1] == b"the renewed one"
    assert used.count(b"the renewed one") == 1


async def test_a_replica_that_refuses_the_token_is_unused_until_it_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Health checks need no token, so the replica looks reachable."""
    target = FakeTarget()
    other = FakeTarget()
    is_known = False
    tell = target.GetModelInfo

    async def guarded(request: object, context: Context) -> object:
        if not is_known:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")
        return await tell(request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "GetModelInfo", guarded)
    async with (
        served(target, other) as (first, second),
        started(ReplicaRegistry(settings(f"{first.address},{second.address}"))) as replicas,
    ):
        refused = await becomes(replicas, first.address, ReplicaState.REFUSED)
        assert refused.reason == "target service: the token is not known"
        is_known = True
        await becomes(replicas, first.address, ReplicaState.READY)


async def test_a_stopped_replica_is_down_and_used_again_once_ready() -> None:
    async with followed(FakeTarget()) as (replicas, (target,)):
        for status in (NOT_SERVING, SERVING):
            await target.stop()
            down = await becomes(replicas, target.address, ReplicaState.DOWN)
            assert down.reason
            assert down.model is not None, "its model is still known"
            await target.start(status)
            if status == NOT_SERVING:
                await until(lambda: "starting" in shot(replicas, target.address).reason)
                assert shot(replicas, target.address).state is ReplicaState.CONNECTING
                await target.say(SERVING)
            await becomes(replicas, target.address, ReplicaState.READY)


async def test_a_replica_that_does_not_answer_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_coordinator.replicas.pool.UNANSWERED_SECONDS", 0.3)
    async with followed(FakeTarget()) as (replicas, (target,)):
        target.health.answers.clear()
        assert (await becomes(replicas, target.address, ReplicaState.DOWN)).reason == "it does not answer"
        target.health.answers.set()
        await becomes(replicas, target.address, ReplicaState.READY)


async def test_a_replica_with_a_broken_stream_must_pass_a_health_check_first() -> None:
    async with followed(FakeTarget()) as (replicas, (target,)):
        member = replicas.targets.choose()
        assert member is not None
        member.suspect("its stream broke")
        assert shot(replicas, target.address).state is ReplicaState.DOWN
        assert shot(replicas, target.address).reason == "its stream broke"
        assert replicas.targets.choose() is None
        assert await replicas.targets.wait_for_ready(SECONDS) is member


async def test_a_replica_with_another_model_is_incompatible_until_it_returns_with_the_right_one() -> None:
    other = FakeTarget()
    right = other.model_info
    wrong = replace(other.model_info, tokenizer_hash="another", max_length=32)
    async with followed(FakeTarget(), other) as (replicas, (_, second)):
        await becomes(replicas, second.address, ReplicaState.READY)
        for model, state in ((wrong, ReplicaState.INCOMPATIBLE), (right, ReplicaState.READY)):
            await second.stop()
            await becomes(replicas, second.address, ReplicaState.DOWN)
            other.model_info = model
            await second.start()
            seen = await becomes(replicas, second.address, state)
            if state is ReplicaState.INCOMPATIBLE:
                assert "tokenizer_hash is another for this target and hash for the others" in seen.reason
                assert "max_length is 32" in seen.reason


async def test_a_start_without_a_service_gives_the_reason() -> None:
    replicas = ReplicaRegistry(
        settings("127.0.0.1:1,nowhere.invalid:2", start_timeout_seconds=1.0), resolver=names({})
    )
    with pytest.raises(ServiceUnavailableError, match="was not ready within 1 s") as raised:
        async with started(replicas):
            pass
    assert "127.0.0.1:1 is connecting" in str(raised.value)
    assert "nowhere.invalid:2 is down (its name cannot be resolved" in str(raised.value)


@pytest.mark.parametrize(
    ("method", "own"), [("eagle3", "as this one by eagle3"), ("", "but this one has none")]
)
async def test_a_draft_address_that_is_a_targets_is_refused_at_once(method: str, own: str) -> None:
    """The start ends with a sentence, however long it may wait for a draft."""
    target = FakeTarget()
    target.model_info = replace(target.model_info, name="big", drafting_method=method)
    async with served(target) as (only,):
        replicas = ReplicaRegistry(settings(only.address, only.address, start_timeout_seconds=SECONDS))
        with pytest.raises(IncompatibleModelsError) as raised:
            async with started(replicas):
                pass
        assert shot(replicas, only.address).role is Role.TARGET
        assert [each.state for each in replicas.drafts.snapshots()] == [ReplicaState.INCOMPATIBLE]
    assert str(raised.value) == (
        "a target service is at this address (big); it must be a draft service: a target drafts by a head of its own "
        f"without a draft address, {own}"
    )


async def test_a_target_address_that_is_a_drafts_is_refused_at_once() -> None:
    async with served(FakeDraft()) as (only,):
        replicas = ReplicaRegistry(settings(only.address, start_timeout_seconds=SECONDS))
        with pytest.raises(IncompatibleModelsError, match="a draft service is at this address"):
            async with started(replicas):
                pass


async def test_an_address_is_followed_from_a_draft_to_a_target_and_back() -> None:
    async with followed(FakeTarget(), FakeDraft()) as (replicas, (_, first)):
        await becomes(replicas, first.address, ReplicaState.READY)
        await first.stop()
        second = Served(FakeTarget(), host=first.host, port=first.port)
        await second.start()
        try:
            seen = await becomes(replicas, first.address, ReplicaState.INCOMPATIBLE)
        finally:
            await second.stop()
        assert seen.reason.startswith("a target service is at this address")
        await first.start()
        await becomes(replicas, first.address, ReplicaState.READY)


async def test_a_draft_that_is_late_joins_a_target_that_serves_alone() -> None:
    async with served(FakeTarget(), FakeDraft()) as (target, draft):
        await draft.say(NOT_SERVING)
        given = settings(target.address, draft.address, start_without_draft=0.2)
        told: list[str] = []
        replicas = ReplicaRegistry(given)
        try:
            await replicas.start(told.append)
            assert replicas.fleet.draft is None
            assert told[-1] == f"the draft service at {draft.address}, for up to 0.2 s"
            await draft.say(SERVING)
            await becomes(replicas, draft.address, ReplicaState.READY)
            assert replicas.fleet.draft is not None
        finally:
            await replicas.close()


async def test_a_draft_that_returns_with_another_method_is_judged_as_new() -> None:
    draft = FakeDraft()
    async with followed(FakeTarget(), draft) as (replicas, (_, served_draft)):
        await served_draft.stop()
        await becomes(replicas, served_draft.address, ReplicaState.DOWN)
        draft.model_info = replace(draft.model_info, vocabulary_size=0, architecture="ngram", max_length=0)
        await served_draft.start()
        await becomes(replicas, served_draft.address, ReplicaState.READY)
        named = replace(draft.model_info, instance_id=draft.streams.instance_id)
        assert replicas.fleet.draft == named


async def test_the_least_busy_replica_is_chosen_and_among_equals_the_fastest() -> None:
    async with followed(FakeTarget(), FakeTarget()) as (replicas, (first, second)):
        for each in (first, second):
            await becomes(replicas, each.address, ReplicaState.READY)
        one, other = replicas.targets.members.values()
        one.step.add(0.2)
        other.step.add(0.1)
        assert replicas.targets.choose() is other
        other.open_sequences = 1
        assert replicas.targets.choose() is one
        assert replicas.targets.choose({one}) is other
        assert replicas.targets.choose({one, other}) is None


@asynccontextmanager
async def named(target: Served) -> AsyncIterator[tuple[ReplicaRegistry, dict[str, list[str]]]]:
    """A registry that resolves the target's name on demand, and the hosts of each name that is known."""
    known = {"targets": ["127.0.0.1"]}
    given = settings(f"targets:{target.port}", resolve_interval_seconds=3600.0)
    async with started(ReplicaRegistry(given, resolver=names(known))) as replicas:
        yield replicas, known


async def test_a_name_stands_for_all_of_its_addresses() -> None:
    """Loopback has many addresses, so one port on several of them is several replicas of one name."""
    async with served(FakeTarget()) as (first,), named(first) as (replicas, known):
        second = Served(FakeTarget(), host="127.0.0.2", port=first.port)
        await second.start()
        added = second.address
        assert [each.address for each in replicas.snapshots()] == [first.address]
        known["targets"].append("127.0.0.2")
        await replicas.targets.look()
        await becomes(replicas, added, ReplicaState.READY)

        member = replicas.targets.members.get(first.address)
        assert member is not None
        member.open_sequences = 1
        known["targets"].remove("127.0.0.1")
        await replicas.targets.look()
        known["targets"].append("127.0.0.1")
        await replicas.targets.look()
        assert member.is_ready, "it was missing once"
        known["targets"].remove("127.0.0.1")
        for _ in range(3):
            await replicas.targets.look()
        assert "no longer stands for" in shot(replicas, first.address).reason
        assert shot(replicas, first.address).state is ReplicaState.DRAINING
        assert replicas.targets.members.get(first.address) is member, "a sequence is still open there"
        member.open_sequences = 0
        await replicas.targets.look()
        await until(lambda: replicas.targets.members.get(first.address) is None)

        del known["targets"]
        for _ in range(3):
            await replicas.targets.look()
        assert shot(replicas, added).state is ReplicaState.READY, "an unreachable name server ends nothing"
        await second.stop()


async def test_an_operators_drain_survives_a_missing_dns_record() -> None:
    async with served(FakeTarget()) as (target,), named(target) as (replicas, known):
        hosts = known["targets"]

        async def go_and_come_back() -> None:
            hosts.clear()
            await replicas.targets.look()
            await replicas.targets.look()
            assert replicas.targets.members.get(target.address) is None
            hosts.append("127.0.0.1")
            await replicas.targets.look()
            member = replicas.targets.members.get(target.address)
            assert member is not None
            await until(lambda: member.model is not None)

        replicas.pool(Role.TARGET).drain(target.address)
        with pytest.raises(InvalidRequestError, match="there is no draft replica"):
            replicas.pool(Role.DRAFT).drain(target.address)
        reason = shot(replicas, target.address).reason
        await go_and_come_back()
        assert (await becomes(replicas, target.address, ReplicaState.DRAINING)).reason == reason
        assert replicas.targets.choose() is None
        replicas.pool(Role.TARGET).resume(target.address)
        await go_and_come_back()
        await becomes(replicas, target.address, ReplicaState.READY)


REQUEST = GenerationRequest((10,), max_tokens=30, temperature=0.0, num_speculative_tokens=2)


def profiled() -> FakeDraft:
    """A draft that says that its steps take much longer with every sequence: no round trip of a busy machine does."""
    draft = FakeDraft()
    steps = {(count, 1): 1.0 * count for count in range(1, 9)}
    draft.model_info = replace(draft.model_info, step_profile=StepProfile(steps, 1))
    return draft


async def test_two_coordinators_spread_over_the_drafts_that_they_share() -> None:
    drafts = profiled(), profiled()
    holds = asyncio.Event()

    class Held(FakeTarget):
        async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
            await holds.wait()
            return await super().verified(tokens, step)

    target = Held()
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(served(target, *drafts))
        clients = []
        for _ in range(2):
            address, service = await stack.enter_async_context(coordinator(settings_over(services)))
            await until(partial(_is_ready, service))
            clients.append(await stack.enter_async_context(Client(address)))
        first = asyncio.create_task(complete(clients[0], REQUEST))
        await until(lambda: sum(draft.running for draft in drafts) == 1)
        # The second coordinator has opened nothing, and learns from the draft itself that it is in use
        await until(lambda: _heard(service))
        second = asyncio.create_task(complete(clients[1], REQUEST))
        await until(lambda: sum(draft.running for draft in drafts) == 2)
        assert [draft.running for draft in drafts] == [1, 1]
        holds.set()
        await asyncio.gather(first, second)


def _is_ready(service: CoordinatorService) -> bool:
    return all(each.state is ReplicaState.READY for each in service.replicas.snapshots())


def _heard(service: CoordinatorService) -> bool:
    """True once a draft has told this coordinator of a sequence."""
    return any(each.client.load.sequences for each in service.replicas.drafts.members.values())


class Full(FakeDraft):
    """Has no place for anybody, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.opened += 1
        await asyncio.Event().wait()


async def test_a_full_draft_costs_no_patience() -> None:
    full = Full()
    async with fleet(FakeTarget(), full, draft_patience_seconds=600.0) as (client, *_):
        found = await complete(client, REQUEST)
    assert found.token_ids == tuple(range(11, 41))
    assert full.opened == 1  # it waits there for a place
