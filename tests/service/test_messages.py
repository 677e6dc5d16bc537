"""What a step of many sequences costs the coordinator: messages, counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.load.fakes import Script, ScriptedDraft, ScriptedTarget, Steps
from coordinator.service import CoordinatorService
from coordinator.transport import streams
from tandem.types import GenerationRequest
from tandem.wire.columns import take_message
from tests.service.fakes import fleet

STREAMS = 16
TOKENS = 100
SCRIPT = Script(0.72)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests in each message that the coordinator writes."""
    counts: list[int] = []

    def counted(outbox: list[Any]) -> Sequence[Any]:
        taken = take_message(outbox)
        counts.append(len(taken))
        return taken

    monkeypatch.setattr(streams, "take_message", counted)
    return counts


@asynccontextmanager
async def scripted_coordinator() -> AsyncIterator[CoordinatorService]:
    """A coordinator before scripted services, all in this process."""
    steps = Steps(0.002), Steps(0.001)
    target, draft = ScriptedTarget(SCRIPT, steps[0]), ScriptedDraft(SCRIPT, steps[1])
    async with fleet(target, draft, draft_ahead="off", num_speculative_tokens=4) as (_, _, service):
        running = [asyncio.create_task(each.run()) for each in steps]
        yield service
        for task in running:
            task.cancel()


async def complete(service: CoordinatorService, number: int) -> int:
    """Complete a request; its rounds."""
    rounds = 0
    request = GenerationRequest((300 + number, 301), max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async for chunk in service.completions.complete(request):
        if chunk.summary is not None:
            rounds = chunk.summary.speculation.rounds
    return rounds


async def test_a_step_of_many_sequences_is_a_few_messages(written: list[int]) -> None:
    async with scripted_coordinator() as service:
        tasks = [asyncio.create_task(complete(service, number)) for number in range(STREAMS)]
        rounds = sum(await asyncio.gather(*tasks))
    # Sequences that are answered by one message ask in one; requests that begin and end ask by themselves.
    assert len(written) <= 2 * rounds / (STREAMS / 3) + 4 * STREAMS
