"""The state of speculation and its reason appear in a completion's summary, in status and in stats."""

from __future__ import annotations

import asyncio

from coordinator.speculation import report as speculation_report
from tandem.admin_client import AdminClient
from tandem.client import Client
from tandem.speculation_state import SpeculationState
from tandem.types import GenerationRequest
from tests.service.fakes import Fake, FakeDraft, FakeTarget, fleet
from tests.service.test_draft_loss import useless

SECONDS = 30.0
REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, seed=1)


async def states(*fakes: Fake, request: GenerationRequest = REQUEST) -> list[SpeculationState]:
    """Return the state in a completion's summary, and then in status and stats."""
    async with asyncio.timeout(SECONDS), fleet(*fakes, speculation_policy="adaptive") as (client, *_):
        return await told(client, request)


async def told(client: Client, request: GenerationRequest) -> list[SpeculationState]:
    summary = (await client.complete(request)).summary
    assert summary.speculation_state is not None
    async with AdminClient(client.address) as admin:
        status, stats = await admin.status(), await admin.stats()
    return [summary.speculation_state, status.speculation_state, stats.speculation_state]


def slow() -> FakeTarget:
    """A target with steps long enough for any draft to pay."""
    target = FakeTarget()
    target.step_seconds = 0.05
    return target


async def test_with_a_useful_draft_speculation_is_on_everywhere() -> None:
    assert await states(slow(), FakeDraft()) == [SpeculationState(True, 2)] * 3


async def test_without_gain_speculation_is_off_with_the_two_deciding_rates() -> None:
    for state in await states(FakeTarget(), useless()):
        assert (state.is_on, state.num_speculative_tokens) == (False, 0)
        assert state.reason == speculation_report.DOES_NOT_PAY
        with_draft, alone = state.figures
        assert (with_draft.name, alone.name) == ("with", "without")
        assert with_draft.unit == alone.unit == "tokens/s"
        assert 0 < with_draft.value < alone.value


async def test_without_a_draft_speculation_is_off() -> None:
    assert await states(FakeTarget()) == [speculation_report.off(speculation_report.NO_DRAFT)] * 3


async def test_a_request_for_the_target_alone_does_not_affect_the_next_one() -> None:
    alone = GenerationRequest((10,), max_tokens=8, temperature=0.0, speculation=False)
    assert await states(FakeTarget(), FakeDraft(), request=alone) == [
        speculation_report.off(speculation_report.NOT_ASKED),
        *[SpeculationState(True, 2)] * 2,
    ]


async def test_a_completion_of_one_token_uses_no_draft() -> None:
    short = GenerationRequest((10,), max_tokens=1, temperature=0.0)
    summary, status, _ = await states(FakeTarget(), FakeDraft(), request=short)
    assert summary == SpeculationState(True, 2, speculation_report.TOO_SHORT)
    assert status == SpeculationState(True, 2)


async def test_an_administrator_can_switch_speculation_off() -> None:
    async with asyncio.timeout(SECONDS), fleet(FakeTarget(), FakeDraft()) as (client, *_):
        async with AdminClient(client.address) as admin:
            await admin.update_config({"speculation": "false"})
        assert await told(client, REQUEST) == [speculation_report.off(speculation_report.DISABLED)] * 3


async def test_an_unreachable_draft_is_the_reason() -> None:
    async with asyncio.timeout(SECONDS), fleet(FakeTarget(), FakeDraft()) as (client, services, _):
        async with AdminClient(client.address) as admin:
            await admin.drain(services[1].address)
        assert await told(client, REQUEST) == [speculation_report.off(speculation_report.NONE_READY)] * 3
