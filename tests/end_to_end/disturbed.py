"""Streams that are disturbed while they run, and the services whose signals disturb them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.client import Client
from tandem.types import GenerationRequest
from tests.end_to_end.processes import Process, Service, coordinator

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

    async def read(
        self, client: Client, wanted: GenerationRequest, begun: asyncio.Event | None = None
    ) -> None:
        async for chunk in client.generate(wanted):
            self.text += chunk.text
            self.token_ids += chunk.token_ids
            self.drafted += chunk.drafted
            if begun is not None:
                begun.set()


async def streamed(client: Client, wanted: GenerationRequest) -> Stream:
    stream = Stream()
    await stream.read(client, wanted)
    return stream


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
