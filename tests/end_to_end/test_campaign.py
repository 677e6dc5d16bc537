"""Drafts and targets are killed, stopped and restarted at random under many streams; clients see only pauses.

Each stream is greedy, or strict with a seed, so its text is a function of the target alone, and a token that is lost,
doubled or different shows. The coordinator is struck as well; its streams end then, with what they had, and are asked
for again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from tandem.clients.client import Client
from tandem.errors import TandemError
from tandem.model.types import GenerationRequest
from tests.end_to_end.processes import NO_KERNELS, Service, of_model, ready, until
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import complete

logger = logging.getLogger(__name__)

TOKENS = 60
PROGRESS_SECONDS = 120.0
END_SECONDS = 45.0
"""Bound on an end after a drain."""
LONGEST_STOP_SECONDS = 6.0
RETRY_SECONDS = 0.2
RECONNECT_SECONDS = 30.0
"""A channel that was refused tells requests so for a while, although the coordinator is back."""


def request(prompt: str, rule: str, max_tokens: int) -> GenerationRequest:
    """Requests whose text is a function of the target alone: greedy, or strict with a seed."""
    if rule == "greedy":
        return GenerationRequest(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(
        prompt, max_tokens=max_tokens, temperature=1.0, seed=11, rejection_sampling_strategy="strict",
        ignore_eos=True,
    )  # fmt: skip


@dataclass
class Record:
    """The outcome of the clients' streams."""

    chunks: list[int]
    """Number of chunks of each stream."""
    completed: int = 0
    broken: int = 0
    """Streams that ended because the coordinator did."""
    coordinator_returned: float = -math.inf
    """When it was there again after the last strike on it; infinity until it is."""
    longest_pause: float = 0.0
    """In seconds, between two chunks of a stream."""


class Campaign:
    """Disturbs replicas at random, and restores them."""

    def __init__(
        self,
        chance: random.Random,
        drafts: Sequence[Service],
        targets: Sequence[Service],
        coordinator: Service,
        record: Record,
    ) -> None:
        self._chance = chance
        self._drafts = drafts
        self._targets = targets
        self._coordinator = coordinator
        self._record = record
        self._began = time.monotonic()
        self.done: Counter[str] = Counter()

    def tell(self) -> None:
        logger.info(
            "%d strikes in %.0f s, %d streams completed, %d broken; longest pause %.2f s: %s",
            self.done.total(),
            time.monotonic() - self._began,
            self._record.completed,
            self._record.broken,
            self._record.longest_pause,
            dict(sorted(self.done.items())),
        )

    async def strike(self) -> None:
        """Kill, stop or restart one replica or several, and wait until all is well."""
        victims = self._victims()
        way = self._chance.choice(("kill", "stop", "restart"))
        names = " and ".join(sorted(each.package.removesuffix("_service") for each in victims))
        self.done[f"{way} {names}"] += 1
        if self._coordinator in victims:
            self._record.coordinator_returned = math.inf
        if way == "kill":
            for each in victims:
                each.kill()
            await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        elif way == "restart":
            for each in victims:
                each.signal(signal.SIGTERM)
            await asyncio.to_thread(_await_ends, victims)
        else:
            for each in victims:
                each.signal(signal.SIGSTOP)
            await asyncio.sleep(self._chance.uniform(0.0, LONGEST_STOP_SECONDS))
            for each in victims:
                each.signal(signal.SIGCONT)
        await asyncio.to_thread(ready, victims)
        if self._coordinator in victims:
            self._record.coordinator_returned = time.monotonic()

    def _victims(self) -> list[Service]:
        everyone = [*self._drafts, *self._targets, self._coordinator]
        if self._chance.random() < 0.6:
            return [self._chance.choice(everyone)]
        pairs = (
            self._drafts,
            self._targets,
            [self._chance.choice(self._drafts), self._chance.choice(self._targets)],
        )
        return list(self._chance.choice(pairs))


def _await_ends(victims: Sequence[Service]) -> None:
    until(
        lambda: not any(each.is_alive for each in victims),
        END_SECONDS,
        lambda: str([each.story for each in victims]),
    )


@asynccontextmanager
async def streaming(
    client: Client, requests: Sequence[GenerationRequest], record: Record, over: asyncio.Event
) -> AsyncIterator[None]:
    """Run one stream per request, repeated without a pause; await all at the end."""
    alone = (replace(each, speculation=False) for each in requests)
    expected = await asyncio.gather(*(complete(client, each) for each in alone))

    async def keep_streaming(number: int) -> None:
        while not over.is_set():
            text = ""
            token_ids = tuple[int, ...]()
            began = time.monotonic()
            last = began
            try:
                async for chunk in client.generate(requests[number]):
                    now = time.monotonic()
                    record.longest_pause = max(record.longest_pause, now - last)
                    last = now
                    text += chunk.text
                    token_ids += chunk.token_ids
                    record.chunks[number] += 1
            except TandemError:
                if began > record.coordinator_returned + RECONNECT_SECONDS:
                    raise
                assert token_ids == expected[number].token_ids[: len(token_ids)]
                record.broken += 1
                await asyncio.sleep(RETRY_SECONDS)
                continue
            assert token_ids == expected[number].token_ids
            assert text == expected[number].text
            record.completed += 1

    async with asyncio.TaskGroup() as group:
        for number in range(len(requests)):
            group.create_task(keep_streaming(number))
        try:
            yield
        finally:
            over.set()


async def all_progress(record: Record) -> None:
    """Return once every stream has received another chunk, so that none loses three targets over the same tokens."""
    before = list(record.chunks)
    async with asyncio.timeout(PROGRESS_SECONDS):
        while any(now == then for now, then in zip(record.chunks, before, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def assert_nothing_lost(
    strikes: int,
    targets: Sequence[Service],
    drafts: Sequence[Service],
    prompts: Sequence[str],
    streams: int = 16,
    seed: int = 19,
    ahead: str = "off",
) -> None:
    """Strike so many times while so many streams run, each time once all of them have gone on."""
    requests = [
        request(prompts[i % len(prompts)], ("greedy", "strict")[i % 2], TOKENS) for i in range(streams)
    ]
    chance = random.Random(seed)
    record = Record([0] * streams)
    over = asyncio.Event()
    addresses = [",".join(each.address for each in services) for services in (targets, drafts)]
    coordinator = Service(
        "tandem_coordinator", "--target-address", addresses[0], "--draft-address", addresses[1],
        "--speculation-policy", "fixed", "--draft-ahead", ahead,
    )  # fmt: skip
    ready([coordinator])
    campaign = Campaign(chance, drafts, targets, coordinator, record)
    try:
        async with Client(coordinator.address) as client, streaming(client, requests, record, over):
            for _ in range(strikes):
                await all_progress(record)
                await asyncio.sleep(chance.uniform(0.0, 0.2))
                await campaign.strike()
            await all_progress(record)
    finally:
        campaign.tell()
        for each in (coordinator, *targets, *drafts):
            each.kill()
    assert record.completed >= streams


@pytest.mark.slow
async def test_a_strike_of_each_kind_loses_no_token(prompts: list[str]) -> None:
    """A target is killed, a draft and a target are restarted, both are stopped, the coordinator is, a draft is killed:
    such are the first five of this seed. Outcomes that are drafted ahead are outstanding meanwhile."""
    await assert_nothing_lost(5, *pairs(*NO_KERNELS), prompts, streams=4, seed=168, ahead="8")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strikes", "streams"), [pytest.param(100, 16, id="long"), pytest.param(24, 64, id="many")]
)
async def test_kills_stops_and_restarts_lose_no_token(strikes: int, streams: int, prompts: list[str]) -> None:
    await assert_nothing_lost(strikes, *pairs(), prompts, streams)


def pairs(*options: str) -> tuple[list[Service], list[Service]]:
    """Two targets and two drafts with these options, which are ready."""
    targets, drafts = (
        [Service(package, *of_model(model), *options) for _ in range(2)]
        for package, model in (("tandem_target", DEMO_TARGET), ("tandem_draft", DEMO_DRAFT))
    )
    ready([*targets, *drafts])
    return targets, drafts
