"""A target answers health checks but no steps: its requests continue elsewhere, and it gets no new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tandem.client import Client
from tandem.errors import ServiceUnavailableError
from tandem.replica import ReplicaSnapshot, ReplicaState
from tandem.types import GenerationRequest, Verification, VerifyStep
from tests.service.clients import Completed, complete, until
from tests.service.fakes import FakeTarget, Fleet, fleet

SECONDS = 30.0
BOUND_SECONDS = 0.5
PROBE_LENGTH = 2
"""Tokens of a probe, as `TargetClient.probe` asks."""
REQUEST = GenerationRequest((1, 2, 3), max_tokens=20, temperature=0.0, ignore_eos=True)
EXPECTED = list(range(4, 24))


class HangingTarget(FakeTarget):
    """Answers this many steps, and hangs on the others."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers
        self.works = asyncio.Event()
        self.steps = 0
        self.requests = 0

    def begin(self, max_length: int) -> list[int]:
        self.requests += max_length > PROBE_LENGTH
        return super().begin(max_length)

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        self.steps += 1
        if self.steps > self.answers:
            await self.works.wait()
        return self.verification(tokens, step)


def shot(tried: Fleet, fake: FakeTarget) -> ReplicaSnapshot:
    address = next(each.address for each in tried.services if each.fake is fake)
    return next(each for each in tried.coordinator.replicas.snapshots() if each.address == address)


@asynccontextmanager
async def over(*fakes: FakeTarget, wait_seconds: float = SECONDS) -> AsyncIterator[Fleet]:
    bounds = {"verification_timeout_seconds": BOUND_SECONDS, "target_wait_seconds": wait_seconds}
    async with asyncio.timeout(3 * SECONDS), fleet(*fakes, **bounds) as tried:
        yield tried


async def four(client: Client) -> list[Completed]:
    return await asyncio.gather(*(complete(client, REQUEST) for _ in range(4)))


@pytest.mark.parametrize("answers", [0, 3])
async def test_requests_continue_beside_a_hanging_target(answers: int) -> None:
    """It hangs from its first step on, or in the middle of streams: no token is lost or repeated."""
    hanging, healthy = HangingTarget(answers), FakeTarget()
    async with over(hanging, healthy) as tried:
        assert [list(each.token_ids) for each in await four(tried.client)] == [EXPECTED] * 4
        assert hanging.steps > answers, "the target hung too early"
        assert shot(tried, hanging).state is ReplicaState.DOWN
        assert "probe" in shot(tried, hanging).reason


async def test_a_hung_target_gets_no_requests_until_it_answers_a_probe() -> None:
    hanging, healthy = HangingTarget(0), FakeTarget()
    async with over(hanging, healthy) as tried:
        await four(tried.client)
        await until(lambda: shot(tried, hanging).state is ReplicaState.DOWN, SECONDS)
        requests = hanging.requests
        for _ in range(3):
            await four(tried.client)
        assert hanging.requests == requests
        assert shot(tried, hanging).state is ReplicaState.DOWN
        hanging.works.set()
        await until(lambda: shot(tried, hanging).state is ReplicaState.READY, SECONDS)
        assert [list(each.token_ids) for each in await four(tried.client)] == [EXPECTED] * 4
        assert hanging.requests > requests


async def test_the_only_target_may_be_slow() -> None:
    """Without another target a sequence stays, and nothing is computed again."""
    slow = HangingTarget(2)
    async with over(slow) as tried:
        task = asyncio.create_task(complete(tried.client, REQUEST))
        await asyncio.sleep(4 * BOUND_SECONDS)
        assert not task.done()
        slow.works.set()
        assert list((await task).token_ids) == EXPECTED
    assert slow.opened == 1


async def test_the_only_target_must_not_hang_forever() -> None:
    hanging = HangingTarget(2)
    async with over(hanging, wait_seconds=0.2) as tried:
        with pytest.raises(ServiceUnavailableError, match="tokens had been delivered"):
            await complete(tried.client, REQUEST)


async def test_a_loss_after_a_long_wait_is_recovered() -> None:
    """A prompt may take longer to read than a request waits for a target."""
    slow, other = HangingTarget(0), FakeTarget()
    async with over(slow, other, wait_seconds=0.3) as tried:
        task = asyncio.create_task(complete(tried.client, REQUEST))
        assert list((await task).token_ids) == EXPECTED
