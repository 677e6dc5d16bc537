"""Draft and target come and go while outcomes are outstanding: the text is that without drafting ahead.

The target's steps take a minimum time, so that on any machine the draft can draft ahead of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

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
from tests.end_to_end.processes import Nursery, Service, address_of, coordinator, service
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
SOAK = pytest.mark.soak
CASES = pytest.mark.parametrize(
    ("runs", "ahead"), [(1, "16"), pytest.param(12, "16", marks=SOAK), pytest.param(12, "4", marks=SOAK)]
)
SOAK_CASES = pytest.mark.parametrize(("runs", "ahead"), [(12, "16"), (12, "4")])


@dataclass(frozen=True)
class Pair:
    """Two targets and two drafts, requests, and their completions without drafting ahead."""

    targets: list[Service]
    drafts: list[Service]
    requests: list[GenerationRequest]
    expected: list[Stream]


@pytest.fixture(scope="module")
def pair(services: Nursery, prompts: list[str]) -> Pair:
    targets = [services.paced_service("target", DEMO_TARGET, PACE) for _ in range(2)]
    drafts = [services.paced_service("draft", DEMO_DRAFT, PACE) for _ in range(2)]
    started([*targets, *drafts])
    requests = [request(prompts[i], ("greedy", "strict")[i % 2], TOKENS) for i in range(STREAMS)]

    async def undisturbed() -> list[Stream]:
        async with joined(targets[:1], drafts[:1], "--draft-ahead", "off") as client:
            return await asyncio.gather(*(streamed(client, each) for each in requests))

    streams = asyncio.run(undisturbed())
    assert not hits(streams)
    assert all(any(each.drafted) for each in streams)
    return Pair(targets, drafts, requests, streams)


def hits(streams: Sequence[Stream]) -> int:
    return sum(stream.hits for stream in streams)


@asynccontextmanager
async def under_way(pair: Pair, client: Client, chance: random.Random) -> AsyncIterator[Disturbance]:
    """Disturb the streams during the block: hits are usual by then, and outcomes are outstanding in all of them."""
    async with begun(client, pair.requests, pair.expected) as disturbed:
        await until(lambda: hits(disturbed.streams) > STREAMS, SECONDS)
        await asyncio.sleep(chance.uniform(0.0, 0.2))  # anywhere in a round
        yield disturbed


@SOAK
@SOAK_CASES
async def test_streams_survive_a_kill_of_the_only_draft(runs: int, ahead: str, pair: Pair) -> None:
    chance = random.Random(1)
    async with joined(pair.targets[:1], pair.drafts[:1], "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with under_way(pair, client, chance) as disturbed:
                pair.drafts[0].kill()
                assert disturbed.is_running
            await asyncio.to_thread(revived, pair.drafts[:1])


@CASES
async def test_one_of_two_drafts_is_killed(runs: int, ahead: str, pair: Pair) -> None:
    """Half of the streams are on it, and they go on drafting ahead on the other."""
    chance = random.Random(2)
    async with joined(pair.targets[:1], pair.drafts, "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with under_way(pair, client, chance) as disturbed:
                chance.choice(pair.drafts).kill()
                before = [stream.hits for stream in disturbed.streams]
                assert disturbed.is_running
            for stream, count in zip(disturbed.streams, before, strict=True):
                assert stream.hits > count, "each drafts ahead again"
            await asyncio.to_thread(revived, pair.drafts)


@CASES
async def test_the_only_draft_is_stopped_and_goes_on(runs: int, ahead: str, pair: Pair) -> None:
    """Each request waits for it once, as it does without drafting ahead; when it goes on, so does drafting ahead."""
    chance, draft = random.Random(3), pair.drafts[0]
    with joining(pair.targets[:1], [draft], "--draft-ahead", ahead) as process:

        def late() -> int:
            return process.story.count("draft late")

        async with Client(address_of(process)) as client:
            for _ in range(runs):
                before = late()
                async with under_way(pair, client, chance) as disturbed:
                    streams = disturbed.streams
                    draft.signal(signal.SIGSTOP)
                    try:
                        await until(lambda before=before: late() > before, SECONDS)  # type: ignore[misc]
                        await asyncio.sleep(chance.uniform(0.0, 0.5))
                        assert disturbed.is_running
                        assert late() - before <= STREAMS
                        stopped = hits(streams)
                    finally:
                        draft.signal(signal.SIGCONT)
                    await until(lambda streams=streams, stopped=stopped: hits(streams) > stopped, SECONDS)  # type: ignore[misc]
                pause = max(each.longest_pause_seconds for each in streams)
                logger.info("longest pause with a stopped draft: %.2f s; %d hits", pause, hits(streams))


@SOAK
@SOAK_CASES
async def test_streams_survive_a_kill_of_one_of_two_targets(runs: int, ahead: str, pair: Pair) -> None:
    chance = random.Random(5)
    async with joined(pair.targets, pair.drafts[:1], "--draft-ahead", ahead) as client:
        for _ in range(runs):
            async with under_way(pair, client, chance) as disturbed:
                chance.choice(pair.targets).kill()
                before = hits(disturbed.streams)
                assert disturbed.is_running
            assert hits(disturbed.streams) > before, "drafting ahead goes on beside the other target"
            await asyncio.to_thread(revived, pair.targets)


@pytest.mark.soak
async def test_far_from_the_draft_hits_wait_for_no_message(services: Nursery, prompts: list[str]) -> None:
    """20 ms one way between coordinator and draft: a round that asks waits 40 ms more, and most do not ask."""
    target, draft = started(
        services.paced_service(role, model, FAR_PACE)
        for role, model in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT))
    )
    wanted = [request(prompts[i], ("greedy", "strict")[i], FAR_TOKENS) for i in range(2)]
    streams: dict[str, list[Stream]] = {}
    delay = ("--role", "delay", "--ms", "20", "--to", draft.address)
    with service("benchmarks.pace", *delay) as far:
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
