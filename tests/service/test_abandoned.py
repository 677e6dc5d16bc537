"""Within a second of a client's end nothing of its request is left: no stream, no task, no place in a KV cache."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
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
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.settings import EngineSettings
from tandem.errors import DeadlineError, ServiceUnavailableError
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier, verify_head
from tests.end_to_end.models import random_model, save_model
from tests.paths import ROOT
from tests.service.clients import complete, until
from tests.service.fakes import coordinating, serving

GONE_SECONDS = 1.0
STEP_SECONDS = 0.02
"""Minimum duration of a step; it makes a LONG request outlast every test."""
LONG = GenerationRequest((5, 6, 7), max_tokens=1000, temperature=1.0, seed=1, ignore_eos=True)
MAX_SEQUENCES = 2
GRPC_CALL = "_handle_exceptions"
"""The coroutine that grpc's server runs for each call."""
WATCHES = 2
"""Permanent calls: the coordinator watches the health of both services."""

CLIENT = """
import asyncio, sys
from tandem.client import Client
from tandem.types import GenerationRequest

async def main():
    async with Client(sys.argv[1]) as client:
        async for chunk in client.generate(GenerationRequest((5, 6, 7), max_tokens=1000, ignore_eos=True)):
            print(len(chunk.token_ids), flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    weights = random_model(1, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
                           num_key_value_heads=1)  # fmt: skip
    folder = save_model(weights, tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cpu", dtype="float32", threads=1)


@dataclass(frozen=True)
class Cluster:
    """Both services with real engines, and a coordinator, all in this process."""

    target: Engine[Any, Any]
    draft: Engine[Any, Any]
    target_address: str
    draft_address: str
    address: str
    idle_tasks: Counter[str]
    """Tasks that run while there is no request."""

    @property
    def leftovers(self) -> list[str]:
        """Sequences, reservations and tasks that an idle cluster does not have."""
        usages = {"target": self.target.usage, "draft": self.draft.usage}
        held = [
            f"{name}: {usage}"
            for name, usage in usages.items()
            if usage.sequence_count or usage.waiting_count or usage.reserved_tokens
        ]
        return held + list((_running_tasks() - self.idle_tasks).elements())

    @property
    def is_busy(self) -> bool:
        """True if both services compute a request."""
        return self.target.usage.used_tokens > 0 and self.draft.usage.used_tokens > 0

    async def assert_idle_soon(self) -> None:
        """Assert that within a second both engines are empty and only the idle tasks run."""
        await until(lambda: not self.leftovers, GONE_SECONDS, lambda: "\n".join(self.leftovers))


def _running_tasks() -> Counter[str]:
    """Count the tasks by coroutine, without the test's own."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", repr(task.get_coro())) for task in tasks)


def _serves_one(engine: Engine[Any, Any]) -> bool:
    return engine.usage.sequence_count == 1


@asynccontextmanager
async def _engine(model: LoadedModel, head: Head[Any, Any]) -> AsyncIterator[Engine[Any, Any]]:
    def pause(_: object) -> None:
        time.sleep(STEP_SECONDS)

    engine = Engine(model, head, EngineSettings(max_sequences=MAX_SEQUENCES), on_step=pause)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def cluster(model: LoadedModel) -> AsyncIterator[Cluster]:
    target_servicer, draft_servicer = TargetServicer(), DraftServicer()
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(_engine(model, verify_head))
        draft = await stack.enter_async_context(_engine(model, propose_head))
        target_servicer.verifier = Verifier(target, [_tokenizer_file()])
        draft_servicer.proposer = StandaloneProposer(draft, draft_top_k=8)
        target_address, _ = await stack.enter_async_context(
            serving(
                lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target_servicer, server)
            )
        )
        draft_address, _ = await stack.enter_async_context(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft_servicer, server))
        )
        settings = CoordinatorSettings(target_address=target_address, draft_address=draft_address)
        address = await stack.enter_async_context(coordinating(settings))
        async with Client(address) as client:
            await complete(client, GenerationRequest((5,), max_tokens=2))
        await until(lambda: _running_tasks()[GRPC_CALL] <= WATCHES, 10.0)
        yield Cluster(target, draft, target_address, draft_address, address, _running_tasks())


def _tokenizer_file() -> Path:
    return ROOT / "models" / "demo" / "target" / "tokenizer.json"


async def test_a_completed_request_leaves_nothing_behind(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        assert len((await complete(client, GenerationRequest((5, 6, 7), max_tokens=8))).token_ids) <= 8
    await cluster.assert_idle_soon()


async def test_leaving_the_client_s_loop_leaves_nothing_behind(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        async for _ in client.generate(LONG):
            if cluster.is_busy:
                break
        await cluster.assert_idle_soon()


async def test_cancelling_before_the_first_token_leaves_nothing_behind(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        task = asyncio.create_task(complete(client, LONG))
        await until(lambda: cluster.target.usage.sequence_count > 0, 10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cluster.assert_idle_soon()


async def test_cancelling_while_waiting_for_room_leaves_nothing_behind(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        tasks = [asyncio.create_task(complete(client, LONG)) for _ in range(MAX_SEQUENCES + 1)]
        await until(lambda: cluster.target.usage.waiting_count > 0, 10.0)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await cluster.assert_idle_soon()


async def test_one_client_that_leaves_does_not_disturb_another(cluster: Cluster) -> None:
    async with Client(cluster.address) as leaving, Client(cluster.address) as staying:
        other = staying.generate(LONG)
        await anext(other)
        chunks = leaving.generate(LONG)
        await anext(chunks)
        assert cluster.target.usage.sequence_count == 2
        await chunks.aclose()
        for engine in (cluster.target, cluster.draft):
            await until(partial(_serves_one, engine), GONE_SECONDS)
        assert (await anext(other)).token_ids
        await other.aclose()


async def test_a_deadline_leaves_nothing_behind(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        with pytest.raises(DeadlineError):
            async for _ in client.generate(LONG, timeout_seconds=0.5):
                pass
        await cluster.assert_idle_soon()


async def test_a_killed_client_process_leaves_nothing_behind(cluster: Cluster) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, cluster.address, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline(), "the client has its first tokens"
        await until(lambda: cluster.is_busy, 10.0)
    finally:
        process.send_signal(signal.SIGKILL)
    await process.wait()
    await cluster.assert_idle_soon()


async def test_a_killed_coordinator_process_leaves_nothing_behind(cluster: Cluster) -> None:
    """To the services the coordinator is a client."""
    arguments = (
        "--port",
        "0",
        "--target-address",
        cluster.target_address,
        "--draft-address",
        cluster.draft_address,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "coordinator", *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        lines = [await process.stdout.readline() for _ in range(2)]
        async with Client(lines[1].decode().split()[-1]) as client:
            chunks = client.generate(LONG)
            await anext(chunks)
            await until(lambda: cluster.is_busy, 10.0)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            with pytest.raises(ServiceUnavailableError):
                await anext(chunks)
            await chunks.aclose()
        await cluster.assert_idle_soon()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
