"""Streams that are disturbed while they run, and the services whose signals disturb them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tandem.client import Client
from tandem.types import Chunk, GenerationRequest, SpeculationStats
from tests.end_to_end.processes import Process, Service, address_of, coordinator

MAX_TOKENS = 400
"""Length of a stream that takes at least a third of a second, so that it still runs when it is disturbed."""


def request(prompt: str, rule: str, max_tokens: int = MAX_TOKENS) -> GenerationRequest:
    """Requests whose text is a function of the target alone: greedy, or strict with a seed."""
    if rule == "greedy":
        return GenerationRequest(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(
        prompt, max_tokens=max_tokens, temperature=1.0, seed=11, rejection_sampling_strategy="strict",
        ignore_eos=True,
    )  # fmt: skip


@dataclass
class Stream:
    """A completion as its client receives it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    hits: int = 0
    """Rounds whose proposal was drafted ahead."""
    longest_pause_seconds: float = 0.0
    figures: SpeculationStats = field(default_factory=SpeculationStats)

    async def read(
        self, client: Client, wanted: GenerationRequest, begun: asyncio.Event | None = None
    ) -> None:
        last = time.monotonic()
        async for chunk in client.generate(wanted):
            self.longest_pause_seconds = max(self.longest_pause_seconds, time.monotonic() - last)
            last = time.monotonic()
            self._add(chunk)
            if begun is not None:
                begun.set()

    def _add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.drafted += chunk.drafted
        self.hits += chunk.drafted_ahead
        if chunk.summary is not None:
            assert chunk.summary.completion_tokens == len(self.token_ids)
            self.figures = chunk.summary.speculation


async def streamed(client: Client, wanted: GenerationRequest) -> Stream:
    stream = Stream()
    await stream.read(client, wanted)
    return stream


@dataclass
class Disturbance:
    """Streams that have begun, and their expected text."""

    streams: list[Stream]
    tasks: list[asyncio.Task[None]]
    expected: list[Stream]

    @property
    def is_running(self) -> bool:
        """True until the last stream has ended."""
        return not all(task.done() for task in self.tasks)

    async def end(self) -> None:
        """Wait for the streams, which must be those of the undisturbed run."""
        await asyncio.gather(*self.tasks)
        for stream, expected in zip(self.streams, self.expected, strict=True):
            assert stream.token_ids == expected.token_ids
            assert stream.text == expected.text


@asynccontextmanager
async def begun(
    client: Client, requests: Sequence[GenerationRequest], expected: Sequence[Stream]
) -> AsyncIterator[Disturbance]:
    """Start these requests and wait for the first chunk of each; await and compare them at the end of the block."""
    streams = [Stream() for _ in requests]
    events = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(stream.read(client, wanted, event))
        for stream, wanted, event in zip(streams, requests, events, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in events))
    disturbance = Disturbance(streams, tasks, list(expected))
    assert disturbance.is_running
    try:
        yield disturbance
        await disturbance.end()
    finally:
        for task in tasks:
            task.cancel()


def started(services: Iterable[Service]) -> list[Service]:
    made = list(services)
    for each in made:
        each.start()
    for each in made:
        each.await_ready()
    return made


def revived(services: Sequence[Service]) -> None:
    for each in services:
        if not each.is_alive:
            each.start()
    for each in services:
        each.await_ready()


@asynccontextmanager
async def joined(
    targets: Sequence[Service], drafts: Sequence[Service], *arguments: str
) -> AsyncIterator[Client]:
    with joining(targets, drafts, *arguments) as process:
        async with Client(address_of(process)) as client:
            yield client


@contextmanager
def joining(targets: Sequence[Service], drafts: Sequence[Service], *arguments: str) -> Iterator[Process]:
    """A coordinator over these services, all of them ready."""
    revived([*targets, *drafts])
    # On a busy machine the adaptive policy may stop speculating.
    fixed = ("--speculation-policy", "fixed")
    with coordinator(addresses(targets), addresses(drafts), *fixed, *arguments) as process:
        yield process


def addresses(services: Sequence[Service]) -> str:
    return ",".join(each.address for each in services)
