"""One run of the yardstick: start everything, let everyone do the same in turn, put the figures together."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.compared_services import Addresses, Setup, services
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.models.pairs import Pair, open_pair
from benchmarks.order import chosen, rotated
from benchmarks.reports.report import Cell, Machine, PhaseRow, PrefixGain, Report, WireBytes, cell_of
from benchmarks.settings import BenchSettings
from benchmarks.targets import targets_of
from benchmarks.timing.prefix import PREFIX_TOKENS, prefix_gain
from benchmarks.timing.timed import phase_row, timed_coordinator, wire_bytes
from benchmarks.workload import Outcome, Workload
from tandem.errors import TandemError

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

REFERENCE = "target-alone"
_PAUSE_SECONDS = 0.2
"""Between two contenders: the threads of one may spin for a moment after their last step."""
_WARM_UP_TOKENS = 8
_MAX_PREFIX_ROUNDS = 3
_ENDING_TOKENS = 32

CellKey = tuple[str, int, float]


@dataclass(slots=True)
class Measured:
    """Statistics of the rounds so far."""

    outcomes: dict[CellKey, list[Outcome]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def cells(self) -> tuple[Cell, ...]:
        """The figures of each contender that finished its rounds."""
        return tuple(
            cell_of(*key, outcomes, self._references(key, len(outcomes)))
            for key, outcomes in self.outcomes.items()
            if key[0] not in self.absent
        )

    def _references(self, key: CellKey, count: int) -> Sequence[Outcome | None]:
        found = self.outcomes.get((REFERENCE, *key[1:]), [])
        return [*found, *[None] * count][:count]


async def measure(settings: BenchSettings, progress: Progress, command: str) -> Report:
    """Run the yardstick.

    Raises:
        TandemError: a service of ours could not start or failed. Another engine's failure is part of the report.
    """
    load_before = os.getloadavg()[0]
    progress("preparing the models")
    pair = open_pair(settings.pair, settings.cache_folder, settings.device)
    prompts = pair.prompts()
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        setup = setup_of(settings, pair, prompts, logs)
        progress("starting the services")
        addresses = await stack.enter_async_context(services(setup, prefix_caching=False))
        measured = Measured()
        contenders = await _start(settings, setup, addresses, stack, measured, progress)
        await _run_rounds(settings, prompts, contenders, measured, progress)
        phases = await _phases(settings, addresses, prompts, measured, progress)
        wire = await _wire(settings, addresses, prompts, progress)
        prefix = await _prefix(settings, setup, prompts, progress)
    report = Report(
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
        cells=measured.cells(),
        phases=phases,
        wire=wire,
        prefix=prefix,
        absent=measured.absent,
    )
    return report.model_copy(update={"targets": targets_of(report)})


def setup_of(settings: BenchSettings, pair: Pair, prompts: Sequence[Sequence[int]], logs: Path) -> Setup:
    """Setup that all contenders share."""
    longest = max(max(map(len, prompts)) + settings.max_tokens, PREFIX_TOKENS + _ENDING_TOKENS)
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


async def _start(
    settings: BenchSettings,
    setup: Setup,
    addresses: Addresses,
    stack: AsyncExitStack,
    measured: Measured,
    progress: Progress,
) -> dict[str, Contender]:
    """Those that can start; the others are noted with the reason."""
    started: dict[str, Contender] = {}
    for name in settings.contenders:
        kind = CONTENDERS[name]
        if reason := kind.absent(setup):
            measured.absent[name] = reason
            continue
        progress(f"starting {kind.title}")
        try:
            started[name] = await stack.enter_async_context(kind.start(setup, addresses))
        except TandemError as error:
            if kind.is_ours:
                raise
            measured.absent[name] = str(error)
    return started


async def _run_rounds(
    settings: BenchSettings,
    prompts: Sequence[tuple[int, ...]],
    contenders: dict[str, Contender],
    measured: Measured,
    progress: Progress,
) -> None:
    """A warm-up round, then the rounds that count."""
    cells = [(batch, temperature) for batch in settings.batch for temperature in settings.temperature]
    for number in range(-1, settings.rounds):
        for batch, temperature in cells:
            tokens = settings.max_tokens if number >= 0 else _WARM_UP_TOKENS
            workload = Workload(
                chosen(prompts, batch, max(number, 0)), temperature, tokens, seed=1000 * (number + 1)
            )
            for name in rotated(list(contenders), number):
                largest = CONTENDERS[name].largest_batch
                if name in measured.absent or (largest is not None and batch > largest):
                    continue
                what = f"round {number + 1} of {settings.rounds}" if number >= 0 else "warm-up"
                progress(f"{what}: batch {batch}, temperature {temperature:g}, {CONTENDERS[name].title}")
                outcome = await _run(name, contenders[name], workload, measured)
                if outcome is not None and number >= 0:
                    measured.outcomes.setdefault((name, batch, temperature), []).append(outcome)


async def _run(name: str, contender: Contender, workload: Workload, measured: Measured) -> Outcome | None:
    await asyncio.sleep(_PAUSE_SECONDS)
    try:
        return await contender.run(workload)
    except TandemError as error:
        if CONTENDERS[name].is_ours:
            raise
        measured.absent[name] = str(error)
        return None


async def _phases(
    settings: BenchSettings,
    addresses: Addresses,
    prompts: Sequence[tuple[int, ...]],
    measured: Measured,
    progress: Progress,
) -> tuple[PhaseRow, ...]:
    """Through the services, by a coordinator in this process; in one process, from the rounds that were run."""
    if not settings.phases:
        return ()
    rows = []
    async with timed_coordinator(addresses, settings.num_speculative_tokens) as coordinator:
        for batch in settings.batch:
            for temperature in settings.temperature:
                progress(f"where the time goes: batch {batch}, temperature {temperature:g}")
                for number in range(min(settings.rounds, 2)):
                    await coordinator.run(
                        Workload(
                            chosen(prompts, batch, number),
                            temperature,
                            settings.max_tokens,
                            seed=1000 * number,
                        )
                    )
                rows.append(phase_row("services", batch, temperature, coordinator.take_phases()))
                outcomes = measured.outcomes.get(("one-process", batch, temperature), [])
                rows.append(phase_row("one process", batch, temperature, _joined(outcomes)))
    return tuple(row for row in rows if row is not None)


def _joined(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    names = {name for outcome in outcomes for name in outcome.phases}
    return {name: [s for outcome in outcomes for s in outcome.phases.get(name, [])] for name in names}


async def _wire(
    settings: BenchSettings,
    addresses: Addresses,
    prompts: Sequence[tuple[int, ...]],
    progress: Progress,
) -> tuple[WireBytes, ...]:
    if not settings.phases:
        return ()
    progress("counting bytes")
    return tuple(
        [
            await wire_bytes(
                addresses,
                settings.num_speculative_tokens,
                Workload(chosen(prompts, 1, 0), temperature, settings.max_tokens),
            )
            for temperature in settings.temperature
        ]
    )


async def _prefix(
    settings: BenchSettings,
    setup: Setup,
    prompts: Sequence[tuple[int, ...]],
    progress: Progress,
) -> PrefixGain | None:
    if not settings.prefix:
        return None
    progress("a prefix that was served before")
    rounds = min(settings.rounds, _MAX_PREFIX_ROUNDS)
    kind = CONTENDERS["speculative"]
    async with (
        services(setup, prefix_caching=True) as addresses,
        kind.start(setup, addresses) as contender,
    ):
        return await prefix_gain(contender, prompts, rounds)


def _machine(settings: BenchSettings, load_before: float) -> Machine:
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "grpcio"):
        versions[package] = metadata.version(package)
    return Machine(
        processor=_processor(),
        cores=settings.cores,
        device=settings.device,
        load_before=round(load_before, 2),
        versions=versions,
    )


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
