"""Soon after a client's end, or an abort, nothing of its request is left: no step, stream, task or KV cache."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.clients.client import Client
from tandem.drafting.proposal import propose_head
from tandem.engine.core.engine import Engine, RowEngine
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineSettings
from tandem.engine.models.loading import LoadedModel
from tandem.errors import AbortedError, ServiceUnavailableError, TandemError
from tandem.model.types import GenerationRequest
from tandem_draft.proposers.standalone import StandaloneProposer
from tandem_draft.servicer import DraftServicer
from tandem_target.servicer import TargetServicer
from tandem_target.verifier import Verifier
from tests.end_to_end.processes import address_of, coordinator
from tests.paths import DEMO_TARGET
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, FakeTarget, coordinated, fleet, serving
from tests.unit.engine.greedy import started

logger = logging.getLogger(__name__)
"""Logs the numbers for docs/measurements.md; `make soak` shows them."""
GONE_SECONDS = 5.0
"""Less than a LONG request takes."""
SPECULATIVE_TOKENS = 2
STEP_SECONDS = 0.02
"""Minimum duration of a step; it makes a LONG request outlast every test."""
LONG = GenerationRequest((5, 6, 7), max_tokens=1000, temperature=1.0, seed=1, ignore_eos=True,
                         num_speculative_tokens=SPECULATIVE_TOKENS)  # fmt: skip
MAX_SEQUENCES = 2
STEPS_OF_A_ROUND = SPECULATIVE_TOKENS + 1
SHORTER = replace(LONG, max_tokens=120, rejection_sampling_strategy="strict")
MANY_GONE_SECONDS = 10.0
TOKENIZER = DEMO_TARGET / "tokenizer.json"
GRPC_CALL = "_handle_exceptions"
"""The coroutine that grpc's server runs for each call."""
WATCHES = 2
"""Permanent calls: the coordinator watches the health of both services."""


@dataclass
class Cluster:
    """Both services with real engines, and a coordinator, all in this process."""

    step_seconds: float = STEP_SECONDS
    steps: int = 0
    """Those of both engines."""
    engines: list[Engine[Any, Any]] = field(default_factory=list)
    services: tuple[str, str] = ("", "")
    """Addresses of the target and of the draft."""
    address: str = ""
    idle_tasks: Counter[str] = field(default_factory=Counter)
    """Tasks that run while there is no request."""

    @property
    def leftovers(self) -> list[str]:
        """Sequences, reservations and tasks that an idle cluster does not have."""
        usages = [engine.usage for engine in self.engines]
        held = [
            str(usage)
            for usage in usages
            if usage.sequence_count or usage.waiting_count or usage.reserved_tokens
        ]
        return held + list((_running_tasks() - self.idle_tasks).elements())

    async def assert_idle_soon(self, seconds: float = GONE_SECONDS) -> None:
        """Assert that soon both engines are empty and only the idle tasks run."""
        await until(lambda: not self.leftovers, seconds, lambda: "\n".join(self.leftovers))

    def step(self, _record: object) -> None:
        self.steps += 1
        time.sleep(self.step_seconds)


def _running_tasks() -> Counter[str]:
    """Count the tasks by coroutine, without the test's own."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", repr(task.get_coro())) for task in tasks)


@pytest.fixture
async def cluster(model: LoadedModel, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster; a test may say how many sequences it has room for."""
    made = Cluster()
    verifying = TargetServicer()
    proposing = DraftServicer()
    limits = EngineSettings(max_sequences=getattr(request, "param", MAX_SEQUENCES))
    async with (
        started(RowEngine(Backends(model), limits, made.step)) as target,
        started(Engine(Backends(model), propose_head, limits, made.step)) as draft,
        serving(verifying) as (target_address, _),
        serving(proposing) as (draft_address, _),
    ):
        made.engines += [target, draft]
        verifying.verifier = Verifier(target, [TOKENIZER])
        proposing.proposer = StandaloneProposer(draft, draft_top_k=8)
        made.services = target_address, draft_address
        async with coordinated(*made.services) as (client, _):
            made.address = client.address
            await complete(client, GenerationRequest((5,), max_tokens=2))
            await until(lambda: _running_tasks()[GRPC_CALL] <= WATCHES, 10.0)
            made.idle_tasks = _running_tasks()
            yield made


async def test_a_killed_coordinator_process_leaves_nothing_behind(cluster: Cluster) -> None:
    """To the services the coordinator is a client."""
    with coordinator(*cluster.services, "--speculation-policy", "adaptive") as process:
        async with Client(await asyncio.to_thread(address_of, process)) as client:
            chunks = client.generate(LONG)
            await anext(chunks)
            await until(lambda: all(engine.usage.used_tokens for engine in cluster.engines), 10.0)
            process.signal(signal.SIGKILL)
            with pytest.raises(ServiceUnavailableError):
                await anext(chunks)
            await chunks.aclose()
        await cluster.assert_idle_soon()


def resident_mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


async def cancelled(client: Client, chance: random.Random) -> None:
    """Begin a request, and end it after a while in one of the ways of clients."""
    seconds = chance.choice([0.0, 0.002, 0.02, 0.1]) * chance.random()
    way = chance.randrange(3)
    if way == 0:
        task = asyncio.create_task(complete(client, SHORTER))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif way == 1:
        with suppress(TandemError):
            async for _ in client.generate(SHORTER, timeout_seconds=0.001 + seconds):
                pass
    else:
        chunks = client.generate(LONG)
        for _ in range(chance.randrange(1, 4)):
            await anext(chunks)
        await chunks.aclose()


# More requests at once than the KV caches have room for, so that some are cancelled while they wait.
@pytest.mark.parametrize("cluster", [8], indirect=True)
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
        expected = await complete(client, SHORTER)

        async def one_after_the_other(number: int) -> None:
            for _ in range(number):
                await cancelled(client, chance)

        async def cancel_many(number: int) -> None:
            await asyncio.gather(*(one_after_the_other(number // at_once) for _ in range(at_once)))
            await until(
                lambda: not any(engine.usage.sequence_count for engine in cluster.engines), MANY_GONE_SECONDS
            )

        await cancel_many(4 * at_once)
        before = resident_mebibytes()
        await cancel_many(count)
        await cluster.assert_idle_soon(MANY_GONE_SECONDS)
        grown = resident_mebibytes() - before
        assert grown < max_grown_mebibytes
        assert (await complete(client, SHORTER)).token_ids == expected.token_ids
    logger.info("%d cancels, %d at once, %.1f MiB more", count, at_once, grown)


async def test_computation_stops_within_a_round(cluster: Cluster) -> None:
    cluster.step_seconds = 0.03
    async with Client(cluster.address) as client:
        for tokens in (1, 20):
            chunks = client.generate(LONG)
            received = 0
            while received < tokens:
                received += len((await anext(chunks)).token_ids)
            before = cluster.steps
            await chunks.aclose()
            await asyncio.sleep(20 * cluster.step_seconds)
            assert cluster.steps - before <= STEPS_OF_A_ROUND
            await cluster.assert_idle_soon()


REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, num_speculative_tokens=2, seed=1)


async def test_an_abort_during_a_step_reaches_the_client_at_once() -> None:
    target = FakeTarget()
    draft = FakeDraft()
    async with fleet(target, draft) as (client, _, service):
        requests = service.completions.requests
        work = asyncio.create_task(complete(client, REQUEST))
        target.step_seconds = 0.05
        await until(lambda: any(request.completion_tokens > 3 for request in requests.list()), 10)
        (active,) = requests.list()
        target.step_seconds = 30.0  # the next answer would take half a minute
        await until(lambda: active.completion_tokens > 3, 10)
        active.abort("making room")
        tokens = active.completion_tokens
        with pytest.raises(AbortedError, match=f"ended the request after {tokens} tokens: making room"):
            await asyncio.wait_for(work, 20)
        await until(lambda: not requests.list() and target.running == draft.running == 0, 20)
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 0)
        target.step_seconds = 0.0
        assert (await complete(client, REQUEST)).token_ids == tuple(range(11, 51))
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 1)
        assert requests.tokens.total == tokens + 40
        assert target.finished == 1


async def test_an_abort_frees_the_services_while_the_client_does_not_read() -> None:
    """The generator is suspended at a yield, where there is no task to cancel."""
    target = FakeTarget()
    draft = FakeDraft()
    async with fleet(target, draft) as (_, _, service):
        requests = service.completions.requests
        async with aclosing(service.completions.complete(REQUEST)) as chunks:
            await anext(chunks)
            await anext(chunks)
            (active,) = requests.list()
            active.abort()
            active.abort("a second time does nothing")
            await until(lambda: target.running == draft.running == 0, 20)
            with pytest.raises(AbortedError, match=r"after 4 tokens$"):
                await anext(chunks)
        assert requests.list() == []
        assert requests.outcomes.aborted == 1
