"""Signals end, stop and restart real services, and running streams continue with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from tandem.client import Client
from tandem.types import GenerationRequest
from tests.end_to_end.disturbed import (
    Disturbance,
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

PASSING_TOKENS = 40
"""Length of short completions that run beside the others."""
SECONDS = 60.0


@pytest.fixture(scope="module")
def targets(services: Nursery) -> list[Service]:
    return started(services.model_service("target_service", DEMO_TARGET) for _ in range(2))


@pytest.fixture(scope="module")
def drafts(services: Nursery) -> list[Service]:
    return started(services.model_service("draft_service", DEMO_DRAFT) for _ in range(2))


async def test_streams_survive_a_target_that_stops_answering_and_kills(
    targets: list[Service], drafts: list[Service], prompts: list[str]
) -> None:
    """Of two targets each has a stream; one stops. Then the only draft is killed, and one of the targets."""
    chance = random.Random(2)
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
        await asyncio.to_thread(revived, targets)
        for victim in (drafts[0], chance.choice(targets)):
            async with begun(client, requests, expected):
                await asyncio.sleep(chance.uniform(0.0, 0.06))  # at any point of a round
                victim.kill()
            await asyncio.to_thread(revived, [victim])


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
