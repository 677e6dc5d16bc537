"""A lost, late or useless draft costs only the speed-up while that lasts; a draining draft is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from tandem.replica import ReplicaState
from tandem.types import GenerationRequest, Proposal
from tests.service.clients import Completed, complete, until
from tests.service.fakes import NOT_SERVING, SERVING, FakeDraft, FakeTarget, fleet, refusal

TOKENS = 50
PAUSED_BEFORE = 4 * TOKENS // 5
"""Proposals after which a useless draft is paused at the latest: when exactly depends on what rounds take."""
EXPECTED = tuple(range(11, 11 + TOKENS))


REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2, seed=1)


class Failing(FakeDraft):
    """Fails at some steps, counted over all its streams."""

    def __init__(self, *steps: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__()
        self._steps = steps
        self._code = code

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        if len(self.requested) in self._steps:
            raise refusal(self._code, "failed")
        return self.proposal(tokens, count)


class Hanging(FakeDraft):
    """Answers as many steps as this and no more. Before the first it is as one that has no room yet."""

    def __init__(self, answered: int) -> None:
        super().__init__()
        self._answered = answered

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        if len(self.requested) > self._answered:
            await asyncio.Event().wait()
        return self.proposal(tokens, count)


class Useless(FakeDraft):
    """A slow draft whose proposals are always rejected."""

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        await asyncio.sleep(0.005)
        return self.proposal(tokens, count)


def useless() -> FakeDraft:
    return Useless(lambda tokens: 7)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_another_draft_takes_over(code: grpc.StatusCode) -> None:
    failing, other = Failing(*range(3, 99), code=code), FakeDraft()
    async with fleet(FakeTarget(), failing, other) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert other.requested[0] == 0, "it reads the sequence while the target works"
    assert completed.stats.accepted == completed.stats.drafted > TOKENS / 2


@pytest.mark.parametrize(("step", "opened"), [(10, 1), (17, 0)])
async def test_no_other_draft_takes_over_for_the_last_few_tokens(step: int, opened: int) -> None:
    failing, other = Failing(*range(step, 99)), FakeDraft()
    async with fleet(FakeTarget(), failing, other) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert other.opened == opened


async def test_a_draft_that_returns_is_used_again() -> None:
    target, draft = FakeTarget(), Failing(3, 8)
    # The target must not finish before the draft's health was checked.
    target.step_seconds = 0.02
    async with fleet(target, draft) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert draft.opened == 3
    assert completed.stats.accepted == completed.stats.drafted > 0


async def completed_on(first: FakeDraft, other: FakeDraft) -> Completed:
    """Start a completion on the first draft, and then another draft."""
    target = FakeTarget()
    target.step_seconds = 0.02
    async with fleet(target, first, other, draft_patience_seconds=0.05) as (client, services, service):
        await services[2].say(NOT_SERVING)
        states = service.replicas.snapshots
        await until(lambda: any(each.state is ReplicaState.DRAINING for each in states()))
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: first.opened == 1)
        await services[2].say(SERVING)
        completed = await task
        await until(lambda: not first.running)
    return completed


async def test_a_hanging_draft_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.failover.placement._ABANDON_SECONDS", 0.1)
    hanging, other = Hanging(2), FakeDraft()
    assert (await completed_on(hanging, other)).token_ids == EXPECTED
    assert other.opened == 1


async def test_a_draft_that_waits_for_room_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full; a request that moved to another full draft would lose its place in the queue."""
    monkeypatch.setattr("coordinator.failover.placement._ABANDON_SECONDS", 0.1)
    full, other = Hanging(0), FakeDraft()
    assert (await completed_on(full, other)).token_ids == EXPECTED
    assert (full.opened, other.opened) == (1, 0)


async def test_a_paused_request_leaves_a_draft_that_drains() -> None:
    target, draft = FakeTarget(), useless()
    target.step_seconds = 0.04
    async with fleet(target, draft, speculation_policy="adaptive") as (client, services, _):
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: target.longest > TOKENS // 2)
        await services[1].say(NOT_SERVING)
        await until(lambda: not draft.running)
        assert not task.done()
        assert (await task).token_ids == EXPECTED


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_draining_draft_is_left_between_two_rounds(role: str) -> None:
    """It still answers, so no proposal is lost."""
    fakes = (FakeTarget(), FakeTarget(), FakeDraft(), FakeDraft())
    for target in fakes[:2]:
        target.step_seconds = 0.02
    async with fleet(*fakes) as (client, services, _):
        task = asyncio.create_task(complete(client, REQUEST))
        pair = services[:2] if role == "target" else services[2:]
        await until(lambda: any(each.fake.running for each in pair))
        draining, other = sorted(pair, key=lambda each: -each.fake.running)
        await draining.say(NOT_SERVING)
        await until(lambda: not draining.fake.running)
        assert not task.done()
        await until(lambda: other.fake.running == 1)
        completed = await task
    assert completed.token_ids == EXPECTED
    assert completed.stats.accepted == completed.stats.drafted > 0


@pytest.mark.parametrize("rule", [None, "residual"])
async def test_a_useless_draft_is_paused(rule: str | None) -> None:
    draft = useless()
    async with fleet(FakeTarget(), draft, speculation_policy="adaptive") as (client, *_):
        completed = await complete(
            client, replace(REQUEST, temperature=float(rule is not None), rejection_sampling_strategy=rule)
        )
    assert completed.token_ids == EXPECTED
    assert len(draft.requested) < PAUSED_BEFORE, "the prompt, the first rounds, and a probe or two"


async def test_a_useless_draft_is_not_paused_where_that_is_switched_off() -> None:
    draft = useless()
    async with fleet(FakeTarget(), draft) as (client, *_):
        await complete(client, REQUEST)
    assert len(draft.requested) == TOKENS - 1
