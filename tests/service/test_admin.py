"""AdminService over fake services: reports, changes, and the state of speculation with its reason."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.config.origin import Origin
from tandem.errors import InvalidRequestError, ServiceUnavailableError
from tandem.model.speculation_state import SpeculationState
from tandem.model.types import GenerationRequest, StepProfile
from tandem_coordinator import speculation_report as report
from tests.service.clients import complete
from tests.service.fakes import Fake, FakeDraft, FakeTarget, fleet, paced
from tests.service.test_draft_loss import useless

REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, seed=1)


@asynccontextmanager
async def administered(
    target: FakeTarget, draft: FakeDraft
) -> AsyncIterator[tuple[AdminClient, Client, str]]:
    """A coordinator over these fakes: clients of it, and the address of the draft."""
    async with fleet(target, draft) as (client, services, _), AdminClient(client.address) as admin:
        yield admin, client, services[1].address


async def test_a_change_applies_to_new_requests_only() -> None:
    draft = FakeDraft()
    async with administered(paced(0.02), draft) as (admin, client, _):
        begun = asyncio.Event()
        work = asyncio.create_task(complete(client, REQUEST, begun))
        await begun.wait()
        (option,) = await admin.update_config({"num_speculative_tokens": "6"})
        assert (option.value, option.origin) == (6, Origin.LIVE)
        assert option.changed_by.startswith("127.0.0.1:")
        before = await work
        after = await complete(client, REQUEST)
        (option,) = await admin.update_config({}, ["num_speculative_tokens"])
        assert (option.value, option.origin) == (2, Origin.DEFAULT)
        with pytest.raises(InvalidRequestError, match="no option is named"):
            await admin.update_config({})
        again = await complete(client, REQUEST)
    assert [len(done.speculation.positions) for done in (before, after, again)] == [2, 6, 2]
    assert max(draft.requested) == 6


async def test_statistics_are_not_watched_more_often_than_they_are_made() -> None:
    async with administered(FakeTarget(), FakeDraft()) as (admin, *_):
        with pytest.raises(InvalidRequestError, match=r"interval_seconds is 0\.01; it must be at least 0\.1"):
            await anext(admin.watch_stats(0.01))


async def test_statistics_never_decrease_when_requests_end() -> None:
    async with administered(FakeTarget(), FakeDraft()) as (admin, client, _):
        work = [asyncio.create_task(complete(client, REQUEST)) for _ in range(24)]
        rounds = [0]
        while not all(task.done() for task in work):
            rounds.append((await admin.stats()).speculation.rounds)
        rounds.append((await admin.stats()).speculation.rounds)
        assert rounds == sorted(rounds)
        assert rounds[-1] == sum([(await task).speculation.rounds for task in work])


async def test_a_coordinator_that_does_not_answer_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are established, and never accepted
        async with AdminClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.3) as admin:
            with pytest.raises(ServiceUnavailableError, match=r"no answer within 0\.3 s"):
                await admin.status()


async def states(*fakes: Fake, request: GenerationRequest = REQUEST) -> list[SpeculationState]:
    """Return the state in a completion's summary, and then in status and stats."""
    async with fleet(*fakes, speculation_policy="adaptive") as (client, *_):
        return await told(client, request)


async def told(client: Client, request: GenerationRequest) -> list[SpeculationState]:
    summary = (await client.complete(request)).summary
    assert summary.speculation_state is not None
    async with AdminClient(client.address) as admin:
        status = await admin.status()
        stats = await admin.stats()
    return [summary.speculation_state, status.speculation_state, stats.speculation_state]


async def test_without_gain_speculation_is_off_with_the_two_deciding_rates() -> None:
    request = replace(REQUEST, max_tokens=100)
    for state in await states(FakeTarget(), useless(), request=request):
        assert (state.is_on, state.num_speculative_tokens) == (False, 0)
        assert state.reason == report.DOES_NOT_PAY
        with_draft, alone = state.figures
        assert (with_draft.name, alone.name) == ("with", "without")
        assert with_draft.unit == alone.unit == "tokens/s"
        assert 0 < with_draft.value < alone.value


ON = SpeculationState(True, 2)
LONG_STEPS = partial(paced, 0.05)
"""Makes a target with steps long enough for any draft to pay."""


@pytest.mark.parametrize(
    ("fakes", "options", "summary", "status"),
    [
        ((LONG_STEPS, FakeDraft), {}, ON, ON),
        ((FakeTarget,), {}, *[report.off(report.NO_DRAFT)] * 2),
        ((FakeTarget, FakeDraft), {"speculation": False}, report.off(report.NOT_ASKED), ON),
        ((FakeTarget, FakeDraft), {"max_tokens": 1}, replace(ON, reason=report.TOO_SHORT), ON),
    ],
    ids=["a useful draft", "no draft", "the target alone is asked for", "too short"],
)
async def test_the_state_of_a_completion_and_of_the_coordinator(
    fakes: Sequence[Callable[[], Fake]],
    options: dict[str, Any],
    summary: SpeculationState,
    status: SpeculationState,
) -> None:
    found = await states(*(fake() for fake in fakes), request=replace(REQUEST, **options))
    assert found == [summary, status, status]


async def test_an_administrator_can_switch_speculation_off_and_on_and_drain_the_draft() -> None:
    async with administered(FakeTarget(), FakeDraft()) as (admin, client, draft):
        await admin.update_config({"speculation": "false"})
        assert await told(client, REQUEST) == [report.off(report.DISABLED)] * 3
        assert not (await admin.status()).settings.is_on
        await admin.update_config({"speculation": "on"})
        assert (await client.complete(REQUEST)).speculation.drafted > 0
        await admin.drain(draft)
        assert await told(client, REQUEST) == [report.off(report.NONE_READY)] * 3


@pytest.mark.parametrize(("draft_seconds", "is_said"), [(0.0005, False), (0.02, True)])
async def test_a_start_says_where_drafting_is_not_expected_to_pay(
    draft_seconds: float, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first request: by the profiles alone."""
    services = FakeTarget(), FakeDraft()
    for fake, seconds in zip(services, (0.01, draft_seconds), strict=True):
        profile = StepProfile({(count, tokens): seconds for count in (1, 8) for tokens in (1, 5)})
        fake.model_info = replace(fake.model_info, step_profile=profile)
    async with fleet(*services):
        pass
    assert ("tandem coordinator: drafting is not expected to pay" in capsys.readouterr().out) is is_said
