"""Signals end, stop and restart real services, and running streams continue with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tandem.client import Client
from tandem.types import GenerationRequest
from tests.end_to_end.disturbed import (
    Disturbance,
    Stream,
    begun,
    joined,
    joining,
    request,
    revived,
    started,
    streamed,
)
from tests.end_to_end.processes import Nursery, Service, address_of
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until

pytestmark = pytest.mark.slow

Begin = Callable[[Client], AbstractAsyncContextManager[Disturbance]]
PASSING_TOKENS = 40
"""Length of short completions that run beside the others."""
SECONDS = 60.0


@pytest.fixture(scope="module")
def targets(services: Nursery) -> list[Service]:
    return started(services.model_service("target_service", DEMO_TARGET) for _ in range(2))


@pytest.fixture(scope="module")
def drafts(services: Nursery) -> list[Service]:
    return started(services.model_service("draft_service", DEMO_DRAFT) for _ in range(2))


@pytest.fixture(scope="module")
def begin(targets: list[Service], drafts: list[Service], prompts: list[str]) -> Begin:
    """Begins a greedy and a strict stream, which must go on as without a disturbance."""
    requests = [request(prompts[0], "greedy"), request(prompts[1], "strict")]

    async def undisturbed() -> list[Stream]:
        async with joined(targets[:1], drafts[:1]) as client:
            return [await streamed(client, each) for each in requests]

    expected = asyncio.run(undisturbed())
    return lambda client: begun(client, requests, expected)


async def test_streams_survive_a_kill_of_the_only_draft_and_of_one_of_two_targets(
    targets: list[Service], drafts: list[Service], begin: Begin
) -> None:
    """Each stream runs on one of the targets, and either may be killed."""
    chance = random.Random(2)
    async with joined(targets, drafts[:1]) as client:
        for victim in (drafts[0], chance.choice(targets)):
            async with begin(client):
                await asyncio.sleep(chance.uniform(0.0, 0.06))  # at any point of a round
                victim.kill()
            await asyncio.to_thread(revived, [victim])


async def test_drafting_resumes_when_a_draft_returns(
    targets: list[Service], drafts: list[Service], begin: Begin
) -> None:
    """One of two drafts is killed and restarted: the other takes over its streams, and later both draft."""
    async with joined(targets[:1], drafts) as client:
        async with begin(client) as disturbed:
            drafts[0].kill()
            await asyncio.to_thread(revived, drafts)
        for stream, undisturbed in zip(disturbed.streams, disturbed.expected, strict=True):
            assert sum(stream.drafted) > 0.7 * sum(undisturbed.drafted), "drafting went on"
        drafts[1].kill()
        async with begin(client) as again:
            pass
        for stream, undisturbed in zip(again.streams, again.expected, strict=True):
            # The other one is dead. How many rounds pass until it is left depends on the machine's load.
            assert sum(stream.drafted) > 0.5 * sum(undisturbed.drafted), "the restarted draft is used"


async def test_streams_survive_a_draft_that_stops_answering(
    targets: list[Service], drafts: list[Service], begin: Begin
) -> None:
    """The process is stopped, not ended, so that no connection breaks."""
    async with joined(targets[:1], drafts[:1]) as client:
        try:
            async with begin(client) as disturbed:
                drafts[0].signal(signal.SIGSTOP)
        finally:
            drafts[0].signal(signal.SIGCONT)
        for stream, undisturbed in zip(disturbed.streams, disturbed.expected, strict=True):
            assert sum(stream.drafted) < sum(undisturbed.drafted), "the draft was stopped too late"


async def test_streams_survive_a_target_that_stops_answering(
    targets: list[Service], drafts: list[Service], prompts: list[str]
) -> None:
    requests = [request(prompts[0], "greedy"), request(prompts[1], "strict")]
    async with joined(targets, drafts[:1]) as client:
        # From these streams the coordinator learns how long an answer takes.
        expected = [await streamed(client, each) for each in requests]
        try:
            async with begun(client, requests, expected) as disturbed:
                targets[0].signal(signal.SIGSTOP)
        finally:
            targets[0].kill()
        assert max(each.longest_pause_seconds for each in disturbed.streams) > 1.0, "some stream was on it"


async def test_a_target_and_a_draft_can_be_restarted_by_draining(
    targets: list[Service], drafts: list[Service], prompts: list[str]
) -> None:
    """Each gets a SIGTERM, one after the other, while streams begin and end; the soak test restarts all of them."""
    over = asyncio.Event()
    completed = 0

    async def keep_streaming(client: Client, wanted: GenerationRequest, expected: str) -> None:
        nonlocal completed
        while not over.is_set():
            assert (await streamed(client, wanted)).text == expected
            completed += 1

    def restarted(each: Service) -> None:
        each.process.stop()
        revived([each])

    async with joined(targets, drafts) as client:
        requests = [request(prompts[i], ("greedy", "strict")[i % 2], PASSING_TOKENS) for i in range(4)]
        expected = [(await streamed(client, each)).text for each in requests]
        tasks = [
            asyncio.create_task(keep_streaming(client, *pair))
            for pair in zip(requests, expected, strict=True)
        ]
        try:
            for each in (targets[0], drafts[0]):
                before = completed
                await until(lambda before=before: completed > before, SECONDS)  # type: ignore[misc]
                await asyncio.to_thread(restarted, each)
            over.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    assert completed >= len(requests)


def hits(disturbed: Disturbance) -> int:
    return sum(stream.hits for stream in disturbed.streams)


async def test_drafting_ahead_survives_the_kill_and_the_stop_of_a_draft(
    services: Nursery, prompts: list[str]
) -> None:
    """Outcomes are outstanding in all streams: steps take a minimum time, in which the draft drafts ahead."""
    target, *drafts = started(
        services.paced_service(role, model, "60,1")
        for role, model in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT), ("draft", DEMO_DRAFT))
    )
    requests = [request(prompts[i], ("greedy", "strict")[i % 2], 112) for i in range(8)]
    async with joined([target], drafts[:1], "--draft-ahead", "off") as client:
        expected = await asyncio.gather(*(streamed(client, each) for each in requests))
    with joining([target], drafts, "--draft-ahead", "16") as process:
        async with Client(address_of(process)) as client:
            async with begun(client, requests, expected) as disturbed:
                await until(lambda: hits(disturbed) > len(requests), SECONDS)
                drafts[0].kill()
                counts = [stream.hits for stream in disturbed.streams]
                assert disturbed.is_running
            for stream, count in zip(disturbed.streams, counts, strict=True):
                assert stream.hits > count, "those of the other draft go on, and the others move to it"
            async with begun(client, requests, expected) as disturbed:
                await until(lambda: hits(disturbed) > len(requests), SECONDS)
                late = process.story.count("draft late")
                drafts[1].signal(signal.SIGSTOP)
                try:
                    await until(lambda: process.story.count("draft late") > late, SECONDS)
                    before = hits(disturbed)
                    assert disturbed.is_running
                finally:
                    drafts[1].signal(signal.SIGCONT)
                await until(lambda: hits(disturbed) > before, SECONDS)
            assert process.story.count("draft late") - late <= len(requests), "each waits for it once"
    for each in (target, *drafts):
        each.kill()
