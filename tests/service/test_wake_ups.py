"""What a step of many sequences costs the event loop: wake-ups and messages, counted for every kind of task."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from benchmarks.load.script import Script
from benchmarks.load.scripted_services import VOCABULARY_SIZE, ScriptedDraft, ScriptedTarget
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.transport import streams as multiplexed_stream
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from tandem.v1.types_pb2 import SequencePart
from tandem.wire.columns import take_message
from tests.service.fakes import coordinator, serving

STREAMS = 16
TOKENS = 100
SCRIPT = Script(VOCABULARY_SIZE, 0.72)
OPENING = 10
"""Wake-ups of a request, a reader or a stream that belong to its beginning and its end, at most."""


class CountedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that counts how often its task runs."""

    def __init__(self, wrapped: Coroutine[Any, Any, Any], wake_ups: Counter[str]) -> None:
        # grpc.aio's own coroutines have no name.
        self.__qualname__ = getattr(wrapped, "__qualname__", type(wrapped).__name__)
        self._wrapped = wrapped
        self._wake_ups = wake_ups

    def send(self, value: Any) -> Any:
        self._wake_ups[self.__qualname__] += 1
        return self._wrapped.send(value)

    def throw(self, *error: Any) -> Any:
        return self._wrapped.throw(*error)

    def close(self) -> None:
        self._wrapped.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wrapped.__await__()


@contextmanager
def counting_wake_ups() -> Iterator[Counter[str]]:
    """Count how often the tasks that begin within the block run, by the name of their coroutine."""
    loop = asyncio.get_running_loop()
    wake_ups: Counter[str] = Counter()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(CountedCoroutine(coroutine, wake_ups), loop=loop, **options)

    loop.set_task_factory(make)
    try:
        yield wake_ups
    finally:
        loop.set_task_factory(None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each message of the coordinator's shared streams has."""
    counts: list[int] = []

    def counted(outbox: list[SequencePart], size: Any) -> Sequence[SequencePart]:
        taken = take_message(outbox, size)
        counts.append(len(taken))
        return taken

    monkeypatch.setattr(multiplexed_stream, "take_message", counted)
    return counts


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each message of the services that the coordinator read on shared streams."""
    messages: list[int] = []
    hand_out = multiplexed_stream.MultiplexedStream._hand_out

    async def counted(stream: Any, message: Any) -> None:
        messages.append(len(messages))
        await hand_out(stream, message)

    monkeypatch.setattr(multiplexed_stream.MultiplexedStream, "_hand_out", counted)
    return messages


@asynccontextmanager
async def scripted_coordinator() -> AsyncIterator[CoordinatorService]:
    """A coordinator before scripted services, all in this process."""
    target, draft = ScriptedTarget(SCRIPT, 0.002), ScriptedDraft(SCRIPT, 0.001)
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address, _ = await stack.enter_async_context(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
        )
        running = [asyncio.create_task(each.steps.run()) for each in (target, draft)]
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            speculation_policy="fixed",
            draft_ahead="off",
            num_speculative_tokens=4,
        )
        _, service = await stack.enter_async_context(coordinator(settings))
        yield service
        for task in running:
            task.cancel()


async def complete(service: CoordinatorService, number: int) -> tuple[int, int]:
    """Complete a request; its chunks and rounds."""
    chunks = rounds = 0
    request = GenerationRequest((300 + number, 301), max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async for chunk in service.completions.complete(request):
        chunks += 1
        if chunk.summary is not None:
            rounds = chunk.summary.speculation.rounds
    return chunks, rounds


async def test_a_round_wakes_its_request_twice_and_its_reader_once_and_a_step_is_one_message(
    written: list[int], read: list[int]
) -> None:
    async with scripted_coordinator() as service:
        with counting_wake_ups() as wake_ups:
            tasks = [asyncio.create_task(complete(service, number)) for number in range(STREAMS)]
            found = await asyncio.gather(*tasks)
    chunks, rounds = (sum(each) for each in zip(*found, strict=True))
    constant = OPENING * STREAMS
    assert wake_ups["RequestRunner._run"] <= 2 * rounds + constant, "the draft's answer and the target's"
    assert wake_ups["complete"] <= chunks + constant, "a chunk"
    assert wake_ups["MultiplexedStream._read"] <= len(read) + constant
    assert wake_ups["MultiplexedStream._write"] <= 2 * len(written) + constant, "a question, and its write"
    # Whoever is answered by one message asks in one message; requests that begin and end ask by themselves.
    assert len(written) <= len(read) + 4 * STREAMS
    assert 2 * rounds / len(read) > STREAMS / 3, "answers in a message"
