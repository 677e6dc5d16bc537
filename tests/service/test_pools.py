"""Coordinators that know nothing of each other share drafts: by what a draft says of itself, and fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from coordinator.service import CoordinatorService
from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer
from draft_service.servicer import DraftedFor
from tandem.client import Client
from tandem.engine.core.engine import Engine
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineSettings
from tandem.engine.models.loading import LoadedModel
from tandem.replica import ReplicaState
from tandem.types import (
    Delta,
    DraftOptions,
    GenerationRequest,
    ProposeStep,
    SamplingParams,
    StepProfile,
    Verification,
    VerifyStep,
)
from tests.service.clients import complete, until
from tests.service.engines import started
from tests.service.fakes import FakeDraft, FakeTarget, coordinator, fleet, served, settings_over

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
    members = service.replicas.drafts.members
    return any(each.client.load is not None and each.client.load.sequences for each in members)


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


async def test_a_client_with_one_sequence_is_not_slowed_by_one_with_twenty(model: LoadedModel) -> None:
    """Counted in steps of the engine: a proposal of four tokens takes its four steps, and waits for the end of at most
    one, however many sequences another client has, of which most wait for a place."""
    steps = 0

    def count(_: object) -> None:
        nonlocal steps
        steps += 1

    async def busy(proposer: StandaloneProposer, number: int) -> None:
        async with proposer.sequence(_options("large")) as drafted:
            while True:
                await drafted.propose(ProposeStep(Delta(0, [number + 5, 6, 7]), 4))

    engine = Engine(
        Backends(model), propose_head, EngineSettings(max_sequences=8, kept_sequences=1), on_step=count
    )
    async with started(engine):
        proposer = StandaloneProposer(engine, draft_top_k=8)
        large = [asyncio.create_task(busy(proposer, number)) for number in range(20)]
        await until(lambda: engine.usage.sequence_count == 7 and engine.usage.waiting_count == 13)
        assert engine.is_full
        taken = []
        async with proposer.sequence(_options("small")) as drafted:
            await drafted.propose(ProposeStep(Delta(0, [5, 6, 7]), 0))
            for _ in range(20):
                began = steps
                await drafted.propose(ProposeStep(Delta(0, [5, 6, 7, 8]), 4))
                taken.append(steps - began)
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)
    assert sum(taken) <= 5.5 * len(taken)


def _options(client: str) -> DraftOptions:
    return DraftOptions("fair", SamplingParams(temperature=0.0), 32, client=client)
