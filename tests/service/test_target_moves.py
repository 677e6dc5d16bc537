"""A sequence moves to another target when its own drains, and in no other case."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from coordinator.failover.verifier import MAX_LOSSES
from tandem.errors import TandemError
from tandem.types import GenerationRequest, Verification, VerifyStep
from tests.service.clients import complete, until
from tests.service.fakes import NOT_SERVING, FakeTarget, fleet, refusal

SECONDS = 30.0
TOKENS = 50
EXPECTED = tuple(range(11, 11 + TOKENS))
BREAKING = 5
STEP_SECONDS = 0.03


def request(first_token: int) -> GenerationRequest:
    return GenerationRequest((first_token,), max_tokens=TOKENS, temperature=0.0)


class Breaking(FakeTarget):
    """A target whose stream breaks at a certain prompt."""

    step_seconds = STEP_SECONDS

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        if step.delta.base_length == 0 and tokens[0] == BREAKING:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        return await super().verified(tokens, step)


async def test_a_broken_stream_moves_no_other_sequence() -> None:
    targets = (Breaking(), Breaking())
    async with asyncio.timeout(SECONDS), fleet(*targets) as (client, *_):
        task = asyncio.create_task(complete(client, request(10)))
        await until(lambda: any(each.running for each in targets), SECONDS)
        for _ in range(3):
            with pytest.raises(TandemError, match=f"{MAX_LOSSES} targets were lost"):
                await complete(client, request(BREAKING))
        assert not task.done()
        assert (await task).token_ids == EXPECTED
    assert sum(each.opened for each in targets) == 1 + 3 * MAX_LOSSES


async def test_a_full_target_takes_over_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence may stay on its draining target."""
    monkeypatch.setattr("coordinator.failover.verifier._MOVE_SECONDS", 0.2)
    targets = (Breaking(), Breaking())
    async with asyncio.timeout(SECONDS), fleet(*targets) as (client, services, _):
        task = asyncio.create_task(complete(client, request(10)))
        await until(lambda: any(each.running for each in targets), SECONDS)
        draining, full = sorted(services, key=lambda each: -each.fake.running)
        assert isinstance(full.fake, FakeTarget)
        full.fake.step_seconds = 2 * SECONDS
        await draining.say(NOT_SERVING)
        await until(lambda: full.fake.running == 1, SECONDS)
        assert (await task).token_ids == EXPECTED
        await until(lambda: not full.fake.running and not draining.fake.running, SECONDS)
    assert (draining.fake.opened, full.fake.opened) == (1, 1)
