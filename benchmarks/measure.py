"""One run of `tandem bench`: start everything, let everyone do the same in turn, put the figures together."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bench import BenchSettings
from benchmarks.common import Contender, chosen, rotated
from benchmarks.contenders import CONTENDERS, Addresses, Setup, services, through
from benchmarks.pairs import Pair, open_pair
from benchmarks.peers import Outcome, Workload
from benchmarks.report import Cell, Machine, PhaseRow, PrefixGain, Report, WireBytes, cell_of, with_targets
from benchmarks.timing import PREFIX_TOKENS, phase_row, prefix_gain, timed_coordinator, wire_bytes
from tandem.errors import TandemError

REFERENCE = "target-alone"
AHEAD = "speculative-ahead"
_PAUSE_SECONDS = 0.2
"""Between two contenders: the threads of one may spin for a moment after their last step."""
_WARM_UP_TOKENS = 8
_MAX_PREFIX_ROUNDS = 3
_ENDING_TOKENS = 32


async def measure(settings: BenchSettings, progress: Callable[[str], None], command: str) -> Report:
    """Measure what the settings ask for.

    Args:
        settings: What to measure.
        progress: Told what is measured now.
        command: For the report.

    Raises:
        TandemError: a service of ours could not start or failed. Another engine's failure is part of the report.
    """
    load_before = os.getloadavg()[0]
    progress("preparing the models")
    pair = open_pair(settings.pair, settings.cache_folder, settings.device)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        run = _Run(settings, _setup(settings, pair, logs), pair.prompts(), progress)
        addresses = Addresses("", "", "", "")  # other engines need none
        if settings.fresh:
            await run.rounds(await run.start(addresses, stack, is_ours=False), first=0)
        if not settings.fresh or settings.phases:
            progress("starting the services")
            addresses = await stack.enter_async_context(
                services(run.setup, with_ahead=AHEAD in settings.contenders)
            )
        if not settings.fresh:
            await run.rounds(await run.start(addresses, stack), first=-1)
        phases = await run.phases(addresses) if settings.phases else ()
        wire = await run.wire(addresses) if settings.phases else ()
        prefix = await run.prefix() if settings.prefix else None
    return with_targets(
        Report(
            taken_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            command=command,
            note=settings.note,
            machine=_machine(settings, load_before),
            pair=pair.info,
            dtype=settings.dtype,
            threads=settings.model_threads,
            max_tokens=settings.max_tokens,
            num_speculative_tokens=settings.num_speculative_tokens,
            rounds=settings.rounds,
            titles={name: CONTENDERS[name].title for name in settings.contenders},
            cells=run.cells(),
            phases=phases,
            wire=wire,
            prefix=prefix,
            absent=run.absent,
        )
    )


def _setup(settings: BenchSettings, pair: Pair, logs: Path) -> Setup:
    longest = max(max(map(len, pair.prompts())) + settings.max_tokens, PREFIX_TOKENS + _ENDING_TOKENS)
    return Setup(
        target=pair.target,
        draft=pair.draft,
        dtype=settings.dtype,
        threads=settings.model_threads,
        device=settings.device,
        draft_device=settings.draft_device,
        max_length=longest,
        max_sequences=max(*settings.batch, 2),
        num_speculative_tokens=settings.num_speculative_tokens,
        logs=logs,
        vllm_python=settings.vllm_python,
        max_python=settings.max_python,
        pace=settings.pace,
        delay_ms=settings.delay,
        head=settings.head,
    )


@dataclass(slots=True)
class _Run:
    """A run, and what it has found so far."""

    settings: BenchSettings
    setup: Setup
    prompts: Sequence[tuple[int, ...]]
    progress: Callable[[str], None]
    outcomes: dict[tuple[str, int, float], list[Outcome]] = field(default_factory=dict)
    """By contender, batch and temperature."""
    absent: dict[str, str] = field(default_factory=dict)
    """Contenders that did not take part, or failed, and why."""

    async def start(
        self, addresses: Addresses, stack: AsyncExitStack, *, is_ours: bool = True
    ) -> dict[str, Contender]:
        """Start those that can start, without Tandem's own unless `is_ours`."""
        started: dict[str, Contender] = {}
        for name in self.settings.contenders:
            kind = CONTENDERS[name]
            if reason := kind.absent(self.setup):
                self.absent[name] = reason
            elif is_ours or not kind.is_ours:
                self.progress(f"starting {kind.title}")
                try:
                    started[name] = await stack.enter_async_context(kind.start(self.setup, addresses))
                except TandemError as error:
                    self._failed(name, error)
        return started

    def _failed(self, name: str, error: TandemError) -> None:
        if CONTENDERS[name].is_ours:
            raise error
        self.absent[name] = str(error)

    def _cells(self) -> Iterator[tuple[int, float]]:
        for batch in self.settings.batch:
            for temperature in self.settings.temperature:
                yield batch, temperature

    async def rounds(self, started: dict[str, Contender], first: int) -> None:
        """Run the rounds, those below 0 to warm up. A contender that has not started starts for each workload."""
        for number in range(first, self.settings.rounds):
            for batch, temperature in self._cells():
                tokens = self.settings.max_tokens if number >= 0 else _WARM_UP_TOKENS
                prompts = chosen(self.prompts, batch, max(number, 0))
                workload = Workload(prompts, temperature, tokens, seed=1000 * (number + 1))
                for name in rotated(self.settings.contenders, number):
                    largest = CONTENDERS[name].largest_batch
                    if name in self.absent or (largest is not None and batch > largest):
                        continue
                    what = f"round {number + 1} of {self.settings.rounds}" if number >= 0 else "warm-up"
                    title = CONTENDERS[name].title
                    self.progress(f"{what}: batch {batch}, temperature {temperature:g}, {title}")
                    await asyncio.sleep(_PAUSE_SECONDS)
                    try:
                        outcome = await self._outcome(name, started.get(name), workload)
                    except TandemError as error:
                        self._failed(name, error)
                        continue
                    if number >= 0:
                        self.outcomes.setdefault((name, batch, temperature), []).append(outcome)

    async def _outcome(self, name: str, contender: Contender | None, workload: Workload) -> Outcome:
        if contender is not None:
            return await contender.run(workload)
        async with (
            services(self.setup, with_ahead=name == AHEAD) as addresses,
            CONTENDERS[name].start(self.setup, addresses) as started,
        ):
            return await started.run(workload)

    def cells(self) -> tuple[Cell, ...]:
        """The figures of each contender that finished its rounds."""
        return tuple(
            cell_of(*key, outcomes, self._references(key, len(outcomes)))
            for key, outcomes in self.outcomes.items()
            if key[0] not in self.absent
        )

    def _references(self, key: tuple[str, int, float], count: int) -> Sequence[Outcome | None]:
        found = self.outcomes.get((REFERENCE, *key[1:]), [])
        return [*found, *[None] * count][:count]

    async def phases(self, addresses: Addresses) -> tuple[PhaseRow, ...]:
        """Through the services, by a coordinator in this process; in one process, from the rounds that were run."""
        rows = []
        async with timed_coordinator(addresses, self.settings.num_speculative_tokens) as coordinator:
            for batch, temperature in self._cells():
                self.progress(f"where the time goes: batch {batch}, temperature {temperature:g}")
                for number in range(min(self.settings.rounds, 2)):
                    prompts = chosen(self.prompts, batch, number)
                    await coordinator.run(
                        Workload(prompts, temperature, self.settings.max_tokens, seed=1000 * number)
                    )
                rows.append(phase_row("services", batch, temperature, coordinator.take_phases()))
                joined: dict[str, list[float]] = {}
                for outcome in self.outcomes.get(("one-process", batch, temperature), []):
                    for name, seconds in outcome.phases.items():
                        joined.setdefault(name, []).extend(seconds)
                rows.append(phase_row("one process", batch, temperature, joined))
        return tuple(row for row in rows if row is not None)

    async def wire(self, addresses: Addresses) -> tuple[WireBytes, ...]:
        """Bytes for each token, by temperature."""
        self.progress("counting bytes")
        found = []
        for temperature in self.settings.temperature:
            workload = Workload(chosen(self.prompts, 1, 0), temperature, self.settings.max_tokens)
            found.append(await wire_bytes(addresses, self.settings.num_speculative_tokens, workload))
        return tuple(found)

    async def prefix(self) -> PrefixGain:
        """Time to the first token after a prefix that was served before, by services of their own."""
        self.progress("a prefix that was served before")
        async with (
            services(self.setup, prefix_caching=True, with_ahead=False) as addresses,
            through(addresses.coordinator) as contender,
        ):
            return await prefix_gain(contender, self.prompts, min(self.settings.rounds, _MAX_PREFIX_ROUNDS))


def _machine(settings: BenchSettings, load_before: float) -> Machine:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "grpcio")}
    return Machine(
        processor=_processor(),
        cores=settings.cores,
        device=settings.device,
        load_before=round(load_before, 2),
        versions={"python": platform.python_version(), **versions},
    )


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
