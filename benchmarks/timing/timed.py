"""A coordinator in this process, over real services: where its rounds' time goes, and how many bytes they take."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from benchmarks.compared_services import Addresses
from benchmarks.reports.report import PhaseRow, WireBytes
from benchmarks.timing.phases import PhaseObserver
from benchmarks.timing.relay import Relay, relay
from benchmarks.workload import Workload
from coordinator.requests.runner import RequestRunner
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.types import GenerationRequest

PHASES = ("draft", "verify", "sampling", "wait")


@asynccontextmanager
async def timed_coordinator(
    addresses: Addresses, num_speculative_tokens: int
) -> AsyncIterator[TimedCoordinator]:
    """A coordinator whose rounds are timed."""
    service = CoordinatorService(
        CoordinatorSettings(
            target_address=addresses.target,
            draft_address=addresses.draft,
            num_speculative_tokens=num_speculative_tokens,
        )
    )
    try:
        await service.start()
        observer = PhaseObserver()
        completions = RequestRunner(service.live_config, observer)
        completions.connect(service.completions.services)
        yield TimedCoordinator(completions, observer)
    finally:
        await service.close()


class TimedCoordinator:
    """Completes requests, and knows where the time went."""

    def __init__(self, completions: RequestRunner, observer: PhaseObserver) -> None:
        self._completions = completions
        self._observer = observer

    async def run(self, workload: Workload) -> int:
        """Complete the prompts, all at once; the number of tokens."""

        async def one(index: int) -> int:
            request = GenerationRequest(
                workload.prompts[index],
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                seed=workload.seed + index,
                ignore_eos=True,
            )
            async with aclosing(self._completions.complete(request)) as chunks:
                return sum([len(chunk.token_ids) async for chunk in chunks])

        return sum(await asyncio.gather(*map(one, range(len(workload.prompts)))))

    def take_phases(self) -> dict[str, list[float]]:
        """Seconds of each round since the last time this was asked for, by phase."""
        seconds = dict(self._observer.stopwatch.seconds)
        self._observer.stopwatch.seconds.clear()
        return seconds


def phase_row(path: str, batch: int, temperature: float, phases: dict[str, list[float]]) -> PhaseRow | None:
    """Medians over rounds; None when no round was timed."""
    if not all(phases.get(name) for name in PHASES):
        return None
    medians = {name: statistics.median(phases[name]) for name in PHASES}
    return PhaseRow.model_validate({"path": path, "batch": batch, "temperature": temperature, **medians})


async def wire_bytes(addresses: Addresses, num_speculative_tokens: int, workload: Workload) -> WireBytes:
    """Bytes of the workload on the wire, counted by relays between coordinator and services."""
    async with AsyncExitStack() as stack:
        target: Relay = await stack.enter_async_context(relay(addresses.target))
        draft: Relay = await stack.enter_async_context(relay(addresses.draft))
        relayed = Addresses(target.address, draft.address, addresses.coordinator, addresses.ahead)
        coordinator = await stack.enter_async_context(timed_coordinator(relayed, num_speculative_tokens))
        before = target.byte_count, draft.byte_count
        tokens = await coordinator.run(workload)
        return WireBytes(
            temperature=workload.temperature,
            draft=(draft.byte_count - before[1]) / tokens,
            target=(target.byte_count - before[0]) / tokens,
        )
