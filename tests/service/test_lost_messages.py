"""A message that a proxy loses, or that a target forgets, costs a pause of seconds, and no text."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tandem.clients.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.model.types import DraftedOutcomes, Finish, GenerationRequest, TargetOptions, VerifyStep
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import target as wire
from tests.service.clients import complete, until
from tests.service.engines import Faults, services
from tests.service.fakes import HANG_SECONDS, coordinated, paced, served
from tests.service.message_proxy import MessageProxy, message_proxy, once
from tests.service.test_ahead_fakes import AheadDraft

logger = logging.getLogger(__name__)
"""Logs the longest pauses for docs/measurements.md; `make soak` shows them."""

PAUSE_SECONDS = 5.0
"""A stream pauses for no longer than this, whichever message is lost."""
TOKENS = 48
GREEDY = GenerationRequest("def f(", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
COUNTING = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0)
"""To the fakes, which count."""
REQUESTS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, seed=5, rejection_sampling_strategy="strict"),
    replace(
        GREEDY, temperature=1.0, seed=6, rejection_sampling_strategy="residual", num_speculative_tokens=3
    ),
    replace(GREEDY, logprobs=2),
]


# ---- messages


def said(message: Any, kind: str) -> list[Any]:
    """The parts of a message that hold such content."""
    return [getattr(part, kind) for part in message.parts if part.HasField(kind)]


def is_verification(name: str, content: bytes) -> bool:
    return name == "Verify" and bool(said(target_pb2.VerifyResponse.FromString(content), "verification"))


def is_led(name: str, content: bytes) -> bool:
    """True for an answer to a round that the target began by itself."""
    if name != "Verify":
        return False
    return any(each.led for each in said(target_pb2.VerifyResponse.FromString(content), "verification"))


def is_end(name: str, content: bytes) -> bool:
    return name == "Verify" and bool(said(target_pb2.VerifyResponse.FromString(content), "ending"))


def asks(kind: type[Any]) -> Callable[[str, bytes], bool]:
    """True for messages of a coordinator that hold such a request."""

    def decide(name: str, content: bytes) -> bool:
        if name != "Verify":
            return False
        requests = wire.requests_from_proto(target_pb2.VerifyRequest.FromString(content))
        return any(isinstance(request, kind) for _, request in requests)

    return decide


def is_proposal(name: str, content: bytes) -> bool:
    return name == "Propose" and bool(said(draft_pb2.ProposeResponse.FromString(content), "proposal"))


def is_outcome(name: str, content: bytes) -> bool:
    return name == "Propose" and bool(said(draft_pb2.ProposeResponse.FromString(content), "outcomes"))


def opens_draft(name: str, content: bytes) -> bool:
    return name == "Propose" and bool(said(draft_pb2.ProposeRequest.FromString(content), "open"))


class Forgetful:
    """Keeps what concerns some sequences of a stream from the target, which answers others: it has forgotten them."""

    def __init__(self, only_one: bool) -> None:
        self._forgotten: set[tuple[object, int]] = set()
        self._seen: set[tuple[object, int]] = set()
        self._only_one = only_one
        self.is_due = False

    def edit(self, name: str, content: bytes, stream: object) -> bytes:
        if name != "Verify":
            return content
        requests = list(wire.requests_from_proto(target_pb2.VerifyRequest.FromString(content)))
        asked = {(stream, number) for number, request in requests if isinstance(request, VerifyStep)}
        self._seen |= asked
        if self.is_due and asked:
            self.is_due = False
            self._forgotten |= {min(asked, key=lambda each: each[1])} if self._only_one else self._seen
        kept: list[Any] = [
            (number, each) for number, each in requests if (stream, number) not in self._forgotten
        ]
        return wire.requests_to_proto(kept).SerializeToString()


# ---- streams


@dataclass
class Streams:
    """Streams that run without a pause, and what their clients saw."""

    client: Client
    chunks: list[int]
    longest_pause: float = 0.0
    completed: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep_streaming(self, own: int, request: GenerationRequest, expected: tuple[int, ...]) -> None:
        while not self.over.is_set():
            token_ids: tuple[int, ...] = ()
            last = time.monotonic()
            async for chunk in self.client.generate(request):
                now = time.monotonic()
                self.longest_pause = max(self.longest_pause, now - last)
                last = now
                token_ids += chunk.token_ids
                self.chunks[own] += 1
            assert token_ids == expected
            self.completed += 1

    async def go_on(self) -> None:
        """Return once each stream has received another chunk."""
        before = list(self.chunks)
        await until(lambda: all(now > then for now, then in zip(self.chunks, before, strict=True)), 200.0)


@asynccontextmanager
async def streaming(client: Client, requests: list[GenerationRequest]) -> AsyncIterator[Streams]:
    expected = [await complete(client, each) for each in requests]
    streams = Streams(client, [0] * len(requests))
    async with asyncio.TaskGroup() as group:
        for own, (request, done) in enumerate(zip(requests, expected, strict=True)):
            group.create_task(streams.keep_streaming(own, request, done.token_ids))
        try:
            yield streams
        finally:
            streams.over.set()


@asynccontextmanager
async def proxied(
    target_model: LoadedModel, draft_model: LoadedModel | None, targets: int, **options: Any
) -> AsyncIterator[tuple[Client, list[MessageProxy], MessageProxy | None]]:
    """A coordinator that reaches so many targets, and a draft if there is one, by proxies."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        faults = [Faults() for _ in range(targets)]
        places: Any = services(target_model, draft_model, *faults, step_seconds=0.002, max_sequences=16)
        found, draft = await enter(places)
        proxies = [await enter(message_proxy(each)) for each in found.split(",")]
        drafting = None if draft is None else await enter(message_proxy(draft))
        addresses = ",".join(each.address for each in proxies)
        to_draft = None if drafting is None else drafting.address
        client, _ = await enter(coordinated(addresses, to_draft, **options))
        yield client, proxies, drafting


def losing(what: Callable[[str, bytes], bool], *, is_request: bool = False) -> Callable[[MessageProxy], None]:
    def strike(proxy: MessageProxy) -> None:
        setattr(proxy, "loses_request" if is_request else "loses_answer", once(what))

    return strike


def forgetting(*, only_one: bool) -> Callable[[MessageProxy], None]:
    def strike(proxy: MessageProxy) -> None:
        forgetful = Forgetful(only_one)
        forgetful.is_due = True
        proxy.edit_request = forgetful.edit
        proxy.lost += 1

    return strike


STRIKES: dict[str, Callable[[MessageProxy], None]] = {
    "an answer": losing(is_verification),
    "an answer of a lead": losing(is_verification),
    "an answer that the target was not asked for": losing(is_led),
    "a question": losing(asks(VerifyStep), is_request=True),
    "an open": losing(asks(TargetOptions), is_request=True),
    "a finish": losing(asks(Finish), is_request=True),
    "the news of an end": losing(is_end),
    "outcomes on their way to the target": losing(asks(DraftedOutcomes), is_request=True),
    "one sequence, forgotten": forgetting(only_one=True),
    "all sequences, forgotten": forgetting(only_one=False),
}
AHEAD = ("outcomes on their way to the target",)
"""Only where a draft drafts ahead for a target that leads."""
LEADING = ("an answer of a lead", "an answer that the target was not asked for", *AHEAD)
"""Only where the target begins rounds by itself."""


async def strike_often(
    name: str, count: int, model: LoadedModel, draft: LoadedModel | None, targets: int
) -> float:
    """Strike so many times, each once all streams have gone on; return the longest pause in seconds."""
    options: dict[str, Any] = {"target_lead": 4 if name in LEADING else 0}
    if draft is not None:
        options |= {"draft_ahead": 4}
    async with (
        asyncio.timeout(HANG_SECONDS + 90.0 * count),
        proxied(model, draft, targets, **options) as (client, proxies, _),
        streaming(client, REQUESTS * 3) as streams,
    ):
        chosen: Iterator[MessageProxy] = itertools.cycle(proxies)
        await streams.go_on()
        streams.longest_pause = 0.0
        for _ in range(count):
            proxy = next(chosen)
            before = proxy.lost
            STRIKES[name](proxy)
            await until(lambda proxy=proxy, before=before: proxy.lost > before, 200.0)  # type: ignore[misc]
            await streams.go_on()
            await streams.go_on()
        streams.over.set()
    assert streams.completed >= len(REQUESTS)
    logger.info("%s lost %d times, longest pause %.2f s", name, count, streams.longest_pause)
    return streams.longest_pause


@pytest.mark.parametrize("count", [1, pytest.param(25, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", STRIKES)
async def test_a_lost_message_pauses_no_stream_for_long(
    name: str, count: int, model: LoadedModel, other_model: LoadedModel
) -> None:
    draft = other_model if name in AHEAD else None
    assert await strike_often(name, count, model, draft, targets=2) < PAUSE_SECONDS


@pytest.mark.parametrize(
    "name",
    ["an answer", "an answer that the target was not asked for", "an open", "all sequences, forgotten"],
)
async def test_nor_where_there_is_no_other_target(name: str, model: LoadedModel) -> None:
    assert await strike_often(name, 1, model, None, targets=1) < PAUSE_SECONDS


DRAFT_STRIKES: dict[str, Callable[[MessageProxy], None]] = {
    "a proposal": losing(is_proposal),
    "what opens its sequence": losing(opens_draft, is_request=True),
    "outcomes": losing(is_outcome),
}


@pytest.mark.parametrize("name", DRAFT_STRIKES)
async def test_a_draft_whose_message_is_lost_drafts_again(name: str) -> None:
    """Without another draft, for the same request; no round waits longer than for a draft that hangs."""
    slow = paced(0.08)
    draft = AheadDraft()
    ahead = 4 if name == "outcomes" else "off"
    options: dict[str, Any] = {
        "draft_patience_seconds": 0.25,
        "num_speculative_tokens": 1,
        "draft_ahead": ahead,
    }
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        target, drafting = await enter(served(slow, draft))
        proxy = await enter(message_proxy(drafting.address))
        client, _ = await enter(coordinated(target.address, proxy.address, **options))
        if name != "what opens its sequence":
            await complete(client, COUNTING)
        DRAFT_STRIKES[name](proxy)
        longest = 0.0
        last = time.monotonic()
        chunks = []
        async for chunk in client.generate(COUNTING):
            longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
            chunks.append(chunk)
    assert proxy.lost == 1
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [*range(11, 11 + TOKENS)]
    assert longest < PAUSE_SECONDS / 2
    assert any(any(chunk.drafted) for chunk in chunks[-3:])
