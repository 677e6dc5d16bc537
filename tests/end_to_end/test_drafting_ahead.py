"""Draft and target come and go while outcomes are outstanding: the text is that without drafting ahead.

The target's steps take a minimum time, so that on any machine the draft can draft ahead of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
from collections.abc import Sequence

import pytest

from tandem.client import Client
from tandem.types import GenerationRequest
from tests.end_to_end.disturbed import Stream, begun, joined, joining, request, revived, started, streamed
from tests.end_to_end.nurslings import Nursery, Nursling
from tests.end_to_end.processes import address_of, coordinator, running
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

PACE = "60,1"
"""A step of 16 branches of 8 streams takes half of that where others use the machine."""
FAR_PACE = "90,1"
"""A verification outlasts a round trip of 40 ms and the draft's steps."""
STREAMS = 8
TOKENS = 112
FAR_TOKENS = 60
SECONDS = 60.0
RUNS = pytest.mark.parametrize(
    "runs", [pytest.param(1, id="short"), pytest.param(12, id="long", marks=pytest.mark.soak)]
)
AHEAD = pytest.mark.parametrize("ahead", ["16", pytest.param("4", marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def targets(services: Nursery) -> list[Nursling]:
    return started(services.paced_service("target", DEMO_TARGET, PACE) for _ in range(2))


@pytest.fixture(scope="module")
def drafts(services: Nursery) -> list[Nursling]:
    return started(services.paced_service("draft", DEMO_DRAFT, PACE) for _ in range(2))


@pytest.fixture(scope="module")
def requests(prompts: list[str]) -> list[GenerationRequest]:
    return [request(prompts[i], ("greedy", "strict")[i % 2], TOKENS) for i in range(STREAMS)]


@pytest.fixture(scope="module")
def expected(
    requests: list[GenerationRequest], targets: list[Nursling], drafts: list[Nursling]
) -> list[Stream]:
    """Return the texts without drafting ahead."""

    async def undisturbed() -> list[Stream]:
        async with joined(targets[:1], drafts[:1], "--draft-ahead", "off") as client:
            return await asyncio.gather(*(streamed(client, each) for each in requests))

    streams = asyncio.run(undisturbed())
    assert not hits(streams)
    assert all(any(each.drafted) for each in streams)
    return streams


def hits(streams: Sequence[Stream]) -> int:
    return sum(stream.hits for stream in streams)


async def under_way(streams: Sequence[Stream], chance: random.Random) -> None:
    """Wait until hits are usual, and then for a moment anywhere in a round: outcomes are outstanding in all of them."""
    await until(lambda: hits(streams) > STREAMS, SECONDS, lambda: f"{hits(streams)} hits")
    await asyncio.sleep(chance.uniform(0.0, 0.2))


@RUNS
@AHEAD
async def test_streams_survive_a_kill_of_the_only_draft(
    runs: int,
    ahead: str,
    targets: list[Nursling],
    drafts: list[Nursling],
    requests: list[GenerationRequest],
    expected: list[Stream],
) -> None:
    chance = random.Random(1)
    async with joined(targets[:1], drafts[:1], "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with begun(client, requests, expected) as disturbed:
                await under_way(disturbed.streams, chance)
                drafts[0].kill()
                assert not any(task.done() for task in disturbed.tasks)
                await asyncio.to_thread(revived, drafts[:1])


@RUNS
@AHEAD
async def test_one_of_two_drafts_is_killed(
    runs: int,
    ahead: str,
    targets: list[Nursling],
    drafts: list[Nursling],
    requests: list[GenerationRequest],
    expected: list[Stream],
) -> None:
    """Half of the streams are on it, and they go on drafting ahead on the other."""
    chance = random.Random(2)
    async with joined(targets[:1], drafts, "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with begun(client, requests, expected) as disturbed:
                await under_way(disturbed.streams, chance)
                chance.choice(drafts).kill()
                before = [stream.hits for stream in disturbed.streams]
                assert not any(task.done() for task in disturbed.tasks)
            for stream, count in zip(disturbed.streams, before, strict=True):
                assert stream.hits > count, "each drafts ahead again"
            await asyncio.to_thread(revived, drafts)


@RUNS
@AHEAD
async def test_the_only_draft_is_stopped_and_goes_on(
    runs: int,
    ahead: str,
    targets: list[Nursling],
    drafts: list[Nursling],
    requests: list[GenerationRequest],
    expected: list[Stream],
) -> None:
    """Each request waits for it once, as it does without drafting ahead; when it goes on, so does drafting ahead."""
    chance = random.Random(3)
    with joining(targets[:1], drafts[:1], "--draft-ahead", ahead) as process:
        async with Client(address_of(process)) as client:
            for run in range(runs):
                late = process.story.count("draft late")
                async with begun(client, requests, expected) as disturbed:
                    await under_way(disturbed.streams, chance)
                    drafts[0].signal(signal.SIGSTOP)
                    try:
                        await until(lambda late=late: process.story.count("draft late") > late, SECONDS)  # type: ignore[misc]
                        await asyncio.sleep(chance.uniform(0.0, 0.5))
                        assert not any(task.done() for task in disturbed.tasks)
                        assert process.story.count("draft late") - late <= STREAMS
                        stopped = hits(disturbed.streams)
                    finally:
                        drafts[0].signal(signal.SIGCONT)
                    await until(lambda stopped=stopped: hits(disturbed.streams) > stopped, SECONDS)  # type: ignore[misc]
                pause = max(each.longest_pause_seconds for each in disturbed.streams)
                logger.info(
                    "run %d: longest pause with a stopped draft: %.2f s; %d hits",
                    run,
                    pause,
                    hits(disturbed.streams),
                )


@pytest.mark.soak
@AHEAD
async def test_the_only_draft_stays_stopped(
    ahead: str,
    targets: list[Nursling],
    drafts: list[Nursling],
    requests: list[GenerationRequest],
    expected: list[Stream],
) -> None:
    with joining(targets[:1], drafts[:1], "--draft-ahead", ahead) as process:
        async with Client(address_of(process)) as client:
            try:
                async with begun(client, requests, expected) as disturbed:
                    await under_way(disturbed.streams, random.Random(4))
                    drafts[0].signal(signal.SIGSTOP)
            finally:
                drafts[0].signal(signal.SIGCONT)
            assert 0 < process.story.count("draft late") <= STREAMS


@RUNS
@AHEAD
async def test_streams_survive_a_kill_of_one_of_two_targets(
    runs: int,
    ahead: str,
    targets: list[Nursling],
    drafts: list[Nursling],
    requests: list[GenerationRequest],
    expected: list[Stream],
) -> None:
    chance = random.Random(5)
    async with joined(targets, drafts[:1], "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with begun(client, requests, expected) as disturbed:
                await under_way(disturbed.streams, chance)
                chance.choice(targets).kill()
                before = hits(disturbed.streams)
                assert not any(task.done() for task in disturbed.tasks)
            assert hits(disturbed.streams) > before, "drafting ahead goes on beside the other target"
            await asyncio.to_thread(revived, targets)


@pytest.mark.soak
async def test_far_from_the_draft_hits_wait_for_no_message(services: Nursery, prompts: list[str]) -> None:
    """20 ms one way between coordinator and draft: a round that asks waits 40 ms more, and most do not ask."""
    target, draft = started(
        services.paced_service(role, model, FAR_PACE)
        for role, model in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT))
    )
    delay = (
        sys.executable,
        "-P",
        "-m",
        "benchmarks.pace",
        "--role",
        "delay",
        "--ms",
        "20",
        "--to",
        draft.address,
    )
    wanted = [request(prompts[i], ("greedy", "strict")[i], FAR_TOKENS) for i in range(2)]
    streams: dict[str, list[Stream]] = {}
    with running(*delay) as far:
        for ahead in ("off", "16"):
            options = ("--speculation-policy", "fixed", "--draft-ahead", ahead)
            with coordinator(target.address, address_of(far), *options) as process:
                async with Client(address_of(process)) as client:
                    streams[ahead] = [await streamed(client, each) for each in wanted]
    for stream, undisturbed in zip(streams["16"], streams["off"], strict=True):
        assert stream.token_ids == undisturbed.token_ids
        assert 2 * stream.hits > stream.figures.rounds
        assert stream.figures.ahead.saved_seconds > 0.02 * stream.hits, (
            "a hit saves the messages of a question"
        )
    for each in (target, draft):
        each.kill()
