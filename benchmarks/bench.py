"""`tandem bench`: its options, and one run that starts everything and lets all contenders do the same in turn."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shlex
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain, cycle, islice, pairwise, product
from pathlib import Path

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks import steps
from benchmarks.common import Contender, chosen, free_port, one_sentence, read_options, rotated
from benchmarks.contenders import (
    PREFIX_TOKENS,
    Addresses,
    BenchSettings,
    Setup,
    kind_of,
    models,
    prepared,
    start,
    through,
    title_of,
)
from benchmarks.pace import Pace
from benchmarks.peers import PHASES, Outcome, Workload
from benchmarks.report import Cell, Machine, Report, Table, cell_of, show, write
from tandem.errors import TandemError
from tandem.logs import configure

REFERENCE = "target-alone"
PEERS = ("draft", "target")
_MACHINES_OWN = ("--vllm-python", "--max-python", "--cache-folder")
"""Options whose values mean nothing on other machines."""


def parse(arguments: Sequence[str], program: str = "tandem bench") -> BenchSettings:
    """The settings of a command line."""
    words = "Measure ways of decoding with the same weights and prompts, in turn, on this machine."
    return read_options(BenchSettings, arguments, program, words)


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    errors = Console(stderr=True)
    with one_sentence(), errors.status("") as status:
        settings = parse(arguments, program)
        configure("warning", "text")
        progress = status.update if errors.is_terminal else lambda _: None
        report = uvloop.run(measure(settings, progress, recorded_command(program, arguments)))
    console = Console()
    # Wide enough for the tables, in a pipe or a file
    show(console if console.is_terminal else Console(width=132), report)
    write(report, settings.json_file, settings.markdown_file)


def recorded_command(program: str, arguments: Sequence[str]) -> str:
    """The command for the report, without this machine's paths to other engines' Pythons."""
    words = list(arguments)
    for index, word in enumerate(words):
        option, has_value, _ = word.partition("=")
        if option in _MACHINES_OWN and has_value:
            words[index] = f"{option}=..."
        elif option in _MACHINES_OWN and index + 1 < len(words):
            words[index + 1] = "..."
    return shlex.join([*program.split(), *words])


async def measure(settings: BenchSettings, progress: Callable[[str], None], command: str) -> Report:
    """Measure what the settings ask for."""
    load_before = os.getloadavg()[0]
    progress("preparing the models")
    with prepared(settings) as setup:
        run = _Run(settings, setup, setup.pair.prompts(), progress)
        step_tables = await run.steps() if settings.steps else []
        kinds = map(kind_of, settings.contenders)
        async with AsyncExitStack() as stack:
            if settings.phases or any(kind.shares_models and not kind.absent(setup) for kind in kinds):
                progress("starting the services")
                run.at = await stack.enter_async_context(models(setup))
            await run.rounds(await run.start(stack))
            phases = await run.phases() if settings.phases else []
        prefix, prefix_ratio = await run.prefix() if settings.prefix else ([], None)
    return Report(
        taken_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=command,
        machine=_machine(settings, load_before),
        pair=setup.pair.info,
        settings=settings,
        cells=run.cells(),
        tables=(*run.paced_steps(), *phases, *prefix, *step_tables),
        prefix_ratio=prefix_ratio,
        absent=run.absent,
    )


@dataclass(slots=True)
class _Run:
    settings: BenchSettings
    setup: Setup
    prompts: Sequence[tuple[int, ...]]
    progress: Callable[[str], None]
    at: Addresses = field(default_factory=Addresses)
    outcomes: dict[tuple[str, int, float], list[Outcome]] = field(default_factory=dict)
    """By contender, batch and temperature."""
    target_steps: dict[tuple[str, int, float], list[tuple[float, ...]]] = field(default_factory=dict)
    """Likewise, where steps are paced: see `steps_between`."""
    absent: dict[str, str] = field(default_factory=dict)
    """Reason of each contender that did not take part, or failed."""

    async def steps(self) -> list[Table]:
        """Steps of both models' engines, each in a process that is gone before the services start."""
        rows: list[steps.Row] = []
        for role in ("target", "draft"):
            self.progress(f"steps of the {role}")
            rows += await steps.measured(role, self.setup)
        return [steps.table(rows)]

    async def start(self, stack: AsyncExitStack) -> dict[str, Contender]:
        """Start those that can start."""
        started: dict[str, Contender] = {}
        for name in self.settings.contenders:
            if reason := kind_of(name).absent(self.setup):
                self.absent[name] = reason
            if reason or self._is_fresh(name):
                continue
            self.progress(f"starting {title_of(name)}")
            try:
                started[name] = await stack.enter_async_context(start(name, self.setup, self.at))
            except TandemError as error:
                self._failed(name, error)
        return started

    def _is_fresh(self, name: str) -> bool:
        """True if its coordinator starts anew for each run."""
        return self.settings.fresh and kind_of(name).shares_models and kind_of(name).is_ours

    async def _run(self, name: str, started: dict[str, Contender], workload: Workload) -> Outcome:
        if name in started:
            return await started[name](workload)
        async with start(name, self.setup, self.at) as contender:
            return await contender(workload)

    def _failed(self, name: str, error: TandemError) -> None:
        if kind_of(name).is_ours:
            raise error
        self.absent[name] = str(error)

    def _cells(self) -> Iterator[tuple[int, float]]:
        return product(self.settings.batch, self.settings.temperature)

    async def rounds(self, started: dict[str, Contender]) -> None:
        """Run the rounds, and one before them to warm up."""
        for number in range(-1, self.settings.rounds):
            for batch, temperature in self._cells():
                tokens = self.settings.max_tokens if number >= 0 else 8
                prompts = chosen(self.prompts, batch, max(number, 0))
                workload = Workload(prompts, temperature, tokens, seed=1000 * (number + 1))
                for name in rotated(self.settings.contenders, number):
                    kind = kind_of(name)
                    is_cold = number < 0 and self._is_fresh(name)
                    if name in self.absent or is_cold or batch > (kind.largest_batch or batch):
                        continue
                    what = f"round {number + 1} of {self.settings.rounds}" if number >= 0 else "warm-up"
                    self.progress(f"{what}: batch {batch}, temperature {temperature:g}, {title_of(name)}")
                    # The threads of the last one may spin for a moment after their last step
                    await asyncio.sleep(0.2)
                    began = time.perf_counter()
                    try:
                        outcome = await self._run(name, started, workload)
                    except TandemError as error:
                        self._failed(name, error)
                        continue
                    if number >= 0:
                        cell = name, batch, temperature
                        self.outcomes.setdefault(cell, []).append(outcome)
                        if self.settings.pace and kind.shares_models and kind.is_ours:
                            noted = (self.setup.logs / "target.steps").read_text()
                            figures = steps_between(outcome, began, noted)
                            self.target_steps.setdefault(cell, []).extend(figures)

    def paced_steps(self) -> list[Table]:
        """The target's steps, of which each takes as long whatever its size: one for all sequences is what a token of
        the target alone should cost, and the time between two steps is lost."""
        rows = []
        for cell, found in self.target_steps.items():
            steps, rate, gap = (statistics.median(each) for each in zip(*found, strict=True))
            possible = Pace.from_text(self.settings.pace).verify_seconds
            rows.append((title_of(cell[0]), *cell[1:], steps, rate * possible, gap))
        figures = (
            ("steps per token", "fraction"), ("speed by one token a step", "fraction"), ("between steps", "seconds"),
        )  # fmt: skip
        columns = (("contender", ""), ("batch", "number"), ("temperature", "number"), *figures)
        return [Table(title="Steps of the paced target", columns=columns, rows=tuple(rows))] if rows else []

    def cells(self) -> tuple[Cell, ...]:
        """The figures of each contender that finished its rounds."""
        return tuple(
            cell_of(*key, outcomes, self.outcomes.get((REFERENCE, *key[1:]), []))
            for key, outcomes in self.outcomes.items()
            if key[0] not in self.absent
        )

    async def phases(self) -> list[Table]:
        """Phases of rounds, and bytes for each token at the first batch: through the services by a coordinator of its
        own; in one process from the rounds that were run."""
        rows: list[tuple[str | float | None, ...]] = []
        wire: list[tuple[float, ...]] = []
        async with timed_coordinator(self.setup, self.at) as timed:
            for batch, temperature in self._cells():
                self.progress(f"where the time goes: batch {batch}, temperature {temperature:g}")
                prompts = chosen(self.prompts, batch, 0)
                workload = Workload(prompts, temperature, self.settings.max_tokens)
                await timed(workload)  # to warm up
                means, counted = await timed(workload)
                if batch == self.settings.batch[0]:
                    wire.append((temperature, *counted))
                outcomes = self.outcomes.get(("one-process", batch, temperature), [])
                joined = {
                    name: [s for each in outcomes for s in each.phases.get(name, ())] for name in PHASES
                }
                own = {name: statistics.fmean(seconds) for name, seconds in joined.items() if seconds}
                for path, found in (("services", means), ("one process", own)):
                    if found:
                        lost = (
                            sum(means[each] - own[each] for each in ("draft", "verify"))
                            if means and own
                            else None
                        )
                        values = (*(found[name] for name in PHASES), sum(found.values()))
                        rows.append((path, batch, temperature, *values, lost if found is means else None))
        names = (("path", ""), ("batch", ""), ("temperature", "number"))
        phases = (*PHASES, "round", "of it wire")
        return [
            Table(
                title="A round by phase, means",
                columns=(*names, *((name, "seconds") for name in phases)),
                rows=tuple(rows),
            ),
            Table(
                title="On the wire, for each token",
                columns=(names[2], *((f"{peer} service", "bytes") for peer in PEERS)),
                rows=tuple(wire),
            ),
        ]

    async def prefix(self) -> tuple[list[Table], float]:
        """Time to the first token after a prefix that was served before, by services of their own."""
        self.progress("a prefix that was served before")
        async with (
            models(self.setup, prefix_caching=True) as at,
            start("speculative", self.setup, at) as contender,
        ):
            table, ratio = await prefix_gain(contender, self.prompts, min(self.settings.rounds, 3))
        return [table], ratio


def steps_between(outcome: Outcome, began: float, noted: str) -> Iterator[tuple[float, ...]]:
    """Steps of the target while all sequences are decoded: how many for each token of a sequence, tokens of a sequence
    per second, and the median of the seconds between two; nothing where there are no two."""
    first = max(answer.arrivals[0][0] for answer in outcome.answers)
    last = min(answer.arrivals[-1][0] for answer in outcome.answers)
    arrivals = chain.from_iterable(answer.arrivals for answer in outcome.answers)
    tokens = sum(count for seconds, count in arrivals if first < seconds <= last) / len(outcome.answers)
    times = [tuple(map(float, line.split()[:2])) for line in noted.splitlines()]
    times = [each for each in times if first < each[1] - began <= last]
    if tokens and len(times) > 1:
        gap = statistics.median(later[0] - sooner[1] for sooner, later in pairwise(times))
        yield len(times) / tokens, tokens / (last - first), gap


def _machine(settings: BenchSettings, load_before: float) -> Machine:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "grpcio")}
    if importlib.util.find_spec("vllm"):
        versions["vllm"] = next(metadata.version(name) for name in metadata.packages_distributions()["vllm"])
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        device=settings.device,
        load_before=round(load_before, 2),
        versions={"python": platform.python_version(), **versions},
    )


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- where the time of a round goes and how many bytes it takes, and the gain of a prefix

ENDING_TOKENS = 8
"""Tokens after the prefix, another ending each time."""

Timed = Callable[[Workload], Awaitable[tuple[Mapping[str, float], list[float]]]]
"""Completes a workload; mean seconds of a round by phase, and bytes for each token by peer."""


@asynccontextmanager
async def timed_coordinator(setup: Setup, addresses: Addresses) -> AsyncIterator[Timed]:
    """A coordinator that always proposes and never drafts ahead: rounds without a proposal show neither the phases of a
    round nor what a proposal weighs on the wire, and what is pushed ahead depends on how rounds happen to meet."""
    port = free_port()
    words = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--prometheus-port", str(port))

    def totals() -> Counter[tuple[str, str]]:
        """Values by name, and by phase or peer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: Counter[tuple[str, str]] = Counter()
        for sample in chain.from_iterable(family.samples for family in families):
            found[sample.name, sample.labels.get("phase", sample.labels.get("peer", ""))] += sample.value  # type: ignore[assignment]
        return found

    async with through(setup, addresses.target, addresses.draft, *words) as contender:

        async def run(workload: Workload) -> tuple[Mapping[str, float], list[float]]:
            before = await asyncio.to_thread(totals)
            outcome = await contender(workload)
            used = await asyncio.to_thread(totals)
            used.subtract(before)
            name = "tandem_round_phase_seconds"
            counts = {phase: used[f"{name}_count", phase] for phase in PHASES}
            means = {phase: used[f"{name}_sum", phase] / count for phase, count in counts.items() if count}
            return means, [used["tandem_wire_bytes_total", peer] / outcome.token_count for peer in PEERS]

        yield run


async def prefix_gain(
    contender: Contender, prompts: Sequence[tuple[int, ...]], rounds: int
) -> tuple[Table, float]:
    """Ask for one token after a new prefix, then for one after the same prefix and another ending: the times to the
    first token, and the median over rounds of the second by the first."""

    async def first_token_seconds(prompt: tuple[int, ...]) -> float:
        outcome = await contender(Workload((prompt,), 0.0, 2))
        return outcome.answers[0].arrivals[0][0]

    first, again = [], []
    for number in range(rounds):
        # Another text in each round, and other first tokens: nothing of it was served before.
        text = [*prompts[-1 - number], *chain.from_iterable(prompts[number:])]
        prefix = tuple(islice(cycle(text), PREFIX_TOKENS))
        first.append(await first_token_seconds(prefix + prompts[0][:ENDING_TOKENS]))
        again.append(await first_token_seconds(prefix + prompts[1][-ENDING_TOKENS:]))
    ratio = statistics.median(b / a for a, b in zip(first, again, strict=True))
    spreads = [(statistics.median(each), min(each), max(each)) for each in (first, again)]
    table = Table(
        title=f"Time to first token, {PREFIX_TOKENS} tokens of prefix",
        columns=(
            ("prefix", ""),
            *((name, "seconds") for name in ("median", "lowest", "highest")),
            ("by the first", "ratio"),
        ),
        rows=(("the first time", *spreads[0], None), ("again", *spreads[1], ratio)),
    )
    return table, ratio
