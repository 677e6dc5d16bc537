"""Overload: admitted requests complete unharmed, newcomers get a share, the rest are refused, memory stays bounded."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tandem.clients.client import Client, Retries
from tandem.engine.models.loading import LoadedModel
from tandem.errors import CapacityError
from tandem.model.types import GenerationRequest
from tandem_coordinator.requests.runner import RequestRunner
from tests.end_to_end.processes import Process, address_of, running
from tests.service import engines
from tests.service.clients import complete, until
from tests.service.fakes import HANG_SECONDS, FakeDraft, coordinated, paced, serving

MAX_MIB = 300


@asynccontextmanager
async def coordinator_process(*options: str, step_seconds: float = 0.0) -> AsyncIterator[tuple[Process, str]]:
    """A coordinator in a process of its own, over fakes in this one: the process, and its address."""
    target = paced(step_seconds)
    async with (
        asyncio.timeout(HANG_SECONDS),
        serving(target) as (target_address, _),
        serving(FakeDraft()) as (draft_address, _),
    ):
        addresses = ("--target-address", target_address, "--draft-address", draft_address)
        # The adaptive policy would stop speculating under load.
        policy = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--log-level", "warning")
        # No fork: its memory would count what the nursery has imported.
        command = ("-P", "-m", "tandem_coordinator", "--port", "0", *addresses, *policy, *options)
        with running(sys.executable, *command) as process:
            # The fakes answer from this event loop, so nothing may block it.
            yield process, await asyncio.to_thread(address_of, process)
            assert "unexpected error" not in process.stderr, process.stderr[-4000:]


logger = logging.getLogger(__name__)
"""Logs the numbers for docs/measurements.md; `make soak` shows them."""
pytestmark = pytest.mark.slow
REQUEST = GenerationRequest((10,), max_tokens=20, temperature=0.0, num_speculative_tokens=4)
EXPECTED = tuple(range(11, 31))


def peak_mebibytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


@pytest.mark.parametrize("streams", [200, pytest.param(1000, marks=pytest.mark.soak)])
async def test_many_simultaneous_streams_all_complete_within_the_memory_bound(streams: int) -> None:
    async with coordinator_process("--max-concurrent-requests", str(streams)) as (process, address):
        async with AsyncExitStack() as stack:
            real_clients = [await stack.enter_async_context(Client(address)) for _ in range(streams // 100)]
            gathered = await asyncio.gather(
                *(complete(real_clients[index % len(real_clients)], REQUEST) for index in range(streams))
            )
        peak = peak_mebibytes(process.pid)
    assert {completed.token_ids for completed in gathered} == {EXPECTED}
    assert peak <= MAX_MIB
    logger.info("%d streams, at most %d MiB", streams, peak)


@pytest.mark.parametrize(
    ("seconds", "count"), [(0.0, 80), (2.0, 200), pytest.param(60.0, 6000, marks=pytest.mark.soak)]
)
async def test_of_ten_times_the_capacity_all_complete_or_are_refused_with_a_hint(
    seconds: float, count: int
) -> None:
    """In one moment, or at a fixed rate whether or not earlier requests have ended."""
    refusals: list[float | None] = []

    async def attempt(client: Client) -> tuple[int, ...] | None:
        try:
            return (await complete(client, REQUEST)).token_ids
        except CapacityError as error:
            refusals.append(error.retry_after_seconds)
            return None

    options = ("--max-concurrent-requests", "4", "--max-queued-requests", "4")
    async with (
        coordinator_process(*options, step_seconds=0.1) as (_, address),
        Client(address, retries=Retries(attempts=1)) as client,
    ):
        await attempt(client)
        began = time.monotonic()
        tasks = []
        for number in range(count):
            await asyncio.sleep(began + number * seconds / count - time.monotonic())
            tasks.append(asyncio.create_task(attempt(client)))
        found = await asyncio.gather(*tasks)
    assert set(found) == {EXPECTED, None}
    assert found.count(EXPECTED) >= 8, "as many as may run and wait"
    assert all(hint is not None and hint > 0 for hint in refusals)
    logger.info("%d at %g a second: %d refusals", count, count / (seconds or 1.0), len(refusals))


SECONDS = 60.0
MANY = 28
"""More than may run in the coordinator (16 and 2), and far more than fit the target (8 and 1)."""
LASTING = GenerationRequest((5, 6), max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = GenerationRequest((7, 8), max_tokens=6, temperature=0.0, ignore_eos=True)
CROWD = "192.0.2.1"
NEWCOMER = "192.0.2.2"


async def tokens(completions: RequestRunner, request: GenerationRequest, peer: str) -> list[int]:
    return [token async for chunk in completions.complete(request, peer=peer) for token in chunk.token_ids]


async def test_a_newcomer_is_served_while_another_client_fills_every_place(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    async with (
        engines.target(model, engines.Faults(), 0.01, 9, kept_sequences=1) as (target_address, _),
        engines.draft(other_model, max_sequences=9, kept_sequences=1) as (draft_address, _),
        coordinated(target_address, draft_address, max_concurrent_requests=16, max_queued_requests=16) as (
            _,
            service,
        ),
    ):
        completions = service.completions
        alone = await tokens(completions, SHORT, NEWCOMER)
        crowd = [asyncio.create_task(tokens(completions, LASTING, CROWD)) for _ in range(MANY)]
        try:
            admission = completions.admission
            await until(lambda: (admission.running, admission.queued) == (16, MANY - 16), SECONDS)
            await until(lambda: completions.requests.tokens.total > 200, SECONDS)
            async with asyncio.timeout(SECONDS):
                assert await tokens(completions, SHORT, NEWCOMER) == alone
            assert not any(task.done() for task in crowd), "it waited for the place of one of them"
        finally:
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        await until(lambda: admission.running == admission.queued == 0, SECONDS)
