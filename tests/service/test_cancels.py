"""Requests are cancelled at any moment: computation stops within a round, and nothing of them is left."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer
from draft_service.servicer import DraftServicer
from tandem.client import Client
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Head
from tandem.engine.models.loading import LoadedModel
from tandem.engine.settings import EngineSettings
from tandem.errors import TandemError
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier, verify_head
from tests.paths import DEMO_TARGET
from tests.service.clients import complete, until
from tests.service.engines import tiny_model
from tests.service.fakes import coordinating, serving

logger = logging.getLogger(__name__)
"""Logs the numbers for docs/reliability.md; `make soak` shows them."""

SPECULATIVE_TOKENS = 2
STEPS_OF_A_ROUND = SPECULATIVE_TOKENS + 1
LONG = GenerationRequest(
    (5, 6, 7), max_tokens=400, seed=1, ignore_eos=True, num_speculative_tokens=SPECULATIVE_TOKENS
)
MAX_SEQUENCES = 8
GONE_SECONDS = 10.0


@dataclass
class Cluster:
    """All three services in this process."""

    address: str = ""
    engines: list[Engine[Any, Any]] = field(default_factory=list)
    steps: int = 0
    """The engines of both services."""
    step_seconds: float = 0.0

    def step(self, _record: object) -> None:
        self.steps += 1
        time.sleep(self.step_seconds)

    @property
    def held(self) -> list[str]:
        """Return the sequences and reservations in the KV caches."""
        usages = [engine.usage for engine in self.engines]
        return [
            str(usage)
            for usage in usages
            if usage.sequence_count or usage.waiting_count or usage.reserved_tokens
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def running(
    cluster: Cluster, model: LoadedModel, head: Head[Any, Any]
) -> AsyncIterator[Engine[Any, Any]]:
    engine = Engine(model, head, EngineSettings(max_sequences=MAX_SEQUENCES), on_step=cluster.step)
    engine.start()
    cluster.engines.append(engine)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def cluster(model: LoadedModel) -> AsyncIterator[Cluster]:
    made = Cluster()
    verifying, proposing = TargetServicer(), DraftServicer()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        target = await enter(running(made, model, verify_head))
        draft = await enter(running(made, model, propose_head))
        verifying.verifier = Verifier(target, [DEMO_TARGET / "tokenizer.json"])
        proposing.proposer = StandaloneProposer(draft, draft_top_k=8)
        target_address, _ = await enter(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(verifying, server))
        )
        draft_address, _ = await enter(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(proposing, server))
        )
        settings = CoordinatorSettings(
            target_address=target_address, draft_address=draft_address, speculation_policy="fixed"
        )
        made.address = await enter(coordinating(settings))
        yield made


def tasks() -> Counter[str]:
    """Count the tasks by coroutine."""
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())


def resident_mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


async def cancelled(client: Client, chance: random.Random) -> None:
    """Begin a request, and end it after a while in one of the ways of clients."""
    seconds = chance.choice([0.0, 0.002, 0.02, 0.1]) * chance.random()
    way = chance.randrange(3)
    if way == 0:
        task = asyncio.create_task(complete(client, LONG))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif way == 1:
        with suppress(TandemError):
            async for _ in client.generate(LONG, timeout_seconds=0.001 + seconds):
                pass
    else:
        chunks = client.generate(LONG)
        for _ in range(chance.randrange(1, 4)):
            await anext(chunks)
        await chunks.aclose()


# More requests at once than the KV caches have room for, so that some are cancelled while they wait.
@pytest.mark.parametrize(
    ("count", "at_once", "max_grown_mebibytes"),
    [
        (150, 12, 24),
        pytest.param(5000, 12, 24, marks=pytest.mark.soak),
        pytest.param(5000, 64, 48, marks=pytest.mark.soak),
    ],
)
async def test_cancelled_requests_leave_nothing_behind(
    cluster: Cluster, count: int, at_once: int, max_grown_mebibytes: int
) -> None:
    cluster.step_seconds = 0.001
    chance = random.Random(count)
    async with Client(cluster.address) as client:
        expected = await complete(client, LONG)

        async def one_after_the_other(number: int) -> None:
            for _ in range(number):
                await cancelled(client, chance)

        async def cancel_many(number: int) -> None:
            await asyncio.gather(*(one_after_the_other(number // at_once) for _ in range(at_once)))
            await until(lambda: not cluster.held, GONE_SECONDS, lambda: "\n".join(cluster.held))

        await cancel_many(4 * at_once)
        before, idle = resident_mebibytes(), tasks()
        await cancel_many(count)
        await until(lambda: not tasks() - idle, GONE_SECONDS, lambda: str(tasks() - idle))
        grown = resident_mebibytes() - before
        assert grown < max_grown_mebibytes
        assert (await complete(client, LONG)).token_ids == expected.token_ids
    logger.info("%d cancels, %d at once, %.1f MiB more", count, at_once, grown)


@pytest.mark.parametrize("tokens", [1, 5, 20])
async def test_computation_stops_within_a_round(cluster: Cluster, tokens: int) -> None:
    cluster.step_seconds = 0.03
    async with Client(cluster.address) as client:
        chunks = client.generate(LONG)
        received = 0
        while received < tokens:
            received += len((await anext(chunks)).token_ids)
        before = cluster.steps
        await chunks.aclose()
        await asyncio.sleep(20 * cluster.step_seconds)
        assert cluster.steps - before <= STEPS_OF_A_ROUND
        assert not cluster.held
