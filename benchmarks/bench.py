"""`tandem bench`: its options, and one run that starts everything and lets all contenders do the same in turn."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain, cycle, islice, product
from pathlib import Path

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.contenders import (
    PREFIX_TOKENS,
    BenchSettings,
    Setup,
    kind_of,
    models,
    prepared,
    start,
    through,
    title_of,
)
from benchmarks.peers import PHASES, Contender, Outcome, PacedStep, Workload
from benchmarks.report import Machine, Report, Row, Table, cell_of, show, write
from tandem.config.settings import load_settings
from tandem.errors import TandemError
from tandem.telemetry.logs import configure
from tandem.telemetry.progress import Progress
from tandem_load.common import chosen, free_port, one_sentence, rotated

REFERENCE = "target-alone"
PEERS = ("draft", "target")
ENDING_TOKENS = 8
"""Tokens after the prefix whose second reading is timed, another ending each time."""
_MACHINES_OWN = ("--vllm-python", "--max-python", "--cache-folder")
"""Options whose values mean nothing on other machines."""


def parse(arguments: Sequence[str], program: str = "tandem bench") -> BenchSettings:
    """The settings of a command line."""
    return load_settings(BenchSettings, arguments, program)


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    with one_sentence():
        settings = parse(arguments, program)
        configure("warning", "text")
        with Progress(program, sys.stderr) as progress:
            report = uvloop.run(measure(settings, progress.show, recorded_command(program, arguments)))
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


async def measure(settings: BenchSettings, progress: Callable[..., None], command: str) -> Report:
    """Measure what the settings ask for."""
    load_before = os.getloadavg()[0]
    progress("preparing the models")
    with prepared(settings) as setup:
        run = _Run(setup, progress)
        tables = await run.steps() if settings.steps else []
        kinds = [kind_of(name) for name in settings.contenders if name not in run.absent]
        async with AsyncExitStack() as stack:
            if settings.phases or any(kind.shares_models for kind in kinds):
                progress("starting the services")
                run.setup = await stack.enter_async_context(models(setup))
            await run.rounds(stack)
            phases = await run.phases() if settings.phases else []
        prefix = await run.prefix() if settings.prefix else []
    return Report(
        taken_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=command,
        machine=_machine(settings, load_before),
        pair=setup.pair.info,
        settings=settings,
        cells=tuple(
            cell_of(*key, outcomes, run.outcomes.get((REFERENCE, *key[1:]), []))
            for key, outcomes in run.outcomes.items()
            if key[0] not in run.absent
        ),
        tables=(*phases, *prefix, *tables),
        absent=run.absent,
    )


class _Run:
    def __init__(self, setup: Setup, progress: Callable[..., None]) -> None:
        self.setup = setup
        self.settings = setup.settings
        self.progress = progress
        self.prompts = setup.pair.prompts()
        self.cells = list(product(self.settings.batch, self.settings.temperature))
        self.outcomes: dict[tuple[str, int, float], list[Outcome]] = {}
        """By contender, batch and temperature."""
        reasons = {name: kind_of(name).absent(setup) for name in self.settings.contenders}
        self.absent = {name: reason for name, reason in reasons.items() if reason}
        """Reason of each contender that did not take part, or failed."""
        self.started: dict[str, Contender] = {}

    async def steps(self) -> list[Table]:
        """Steps of both models' engines, each in a process that is gone before the services start."""
        from benchmarks import steps  # of all that is measured, only this needs torch in this process

        self.progress("steps of the target and the draft")
        return [await steps.measured(self.setup)]

    async def _run(self, name: str, stack: AsyncExitStack, workload: Workload) -> Outcome:
        """One run of a contender, which starts before its first run, or each time if its coordinator is to be fresh."""
        # The threads of the last one may spin for a moment after their last step
        await asyncio.sleep(0.2)
        async with AsyncExitStack() as own:
            if (run := self.started.get(name)) is None:
                is_fresh = self._is_fresh(name)
                run = await (own if is_fresh else stack).enter_async_context(start(name, self.setup))
                self.started |= {} if is_fresh else {name: run}
            began = time.perf_counter()
            outcome = await run(workload)
        if self.settings.pace and kind_of(name).has_target_service:
            lines = (self.setup.logs / "target.steps").read_text().splitlines()
            outcome.steps = [_read_step(line, began) for line in lines]
        return outcome

    def _is_fresh(self, name: str) -> bool:
        return self.settings.fresh and kind_of(name).has_shared_target

    async def rounds(self, stack: AsyncExitStack) -> None:
        runs = (self.settings.rounds + 1) * len(self.cells) * len(self.settings.contenders)
        done = 0
        for number in range(-1, self.settings.rounds):
            for batch, temperature in self.cells:
                tokens = self.settings.max_tokens if number >= 0 else 8
                prompts = chosen(self.prompts, batch, max(number, 0))
                workload = Workload(prompts, temperature, tokens, seed=1000 * (number + 1))
                for name in rotated(self.settings.contenders, number):
                    done += 1
                    is_cold = number < 0 and self._is_fresh(name)
                    if name in self.absent or is_cold or batch > (kind_of(name).largest_batch or batch):
                        continue
                    what = f"round {number + 1} of {self.settings.rounds}" if number >= 0 else "warm-up"
                    words = f"{what}: batch {batch}, temperature {temperature:g}, {title_of(name)}"
                    self.progress(words, (done - 1) / runs)
                    try:
                        outcome = await self._run(name, stack, workload)
                    except TandemError as error:
                        if kind_of(name).is_ours:
                            raise
                        self.absent[name] = str(error)
                        continue
                    if number >= 0:
                        self.outcomes.setdefault((name, batch, temperature), []).append(outcome)

    async def phases(self) -> list[Table]:
        """Phases of rounds, and bytes for each token at the first batch: through the services by a coordinator of its
        own; in one process from the rounds that were run.

        The coordinator always proposes and never drafts ahead: rounds without a proposal show neither the phases of a
        round nor what a proposal weighs on the wire, and what is pushed ahead depends on how rounds happen to meet.
        """
        rows: list[Row] = []
        wire: list[Row] = []
        setup = self.setup
        port = free_port()
        words = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--prometheus-port", str(port))
        async with through(setup, setup.target_address, setup.draft_address, *words) as contender:
            for batch, temperature in self.cells:
                self.progress(f"where the time goes: batch {batch}, temperature {temperature:g}")
                prompts = chosen(self.prompts, batch, 0)
                workload = Workload(prompts, temperature, self.settings.max_tokens)
                await contender(workload)  # to warm up
                before = await asyncio.to_thread(_totals, port)
                outcome = await contender(workload)
                used = await asyncio.to_thread(_totals, port)
                used.subtract(before)
                if batch == self.settings.batch[0]:
                    sent = (used["tandem_wire_bytes_total", peer] / outcome.token_count for peer in PEERS)
                    wire.append((temperature, *sent))
                name = "tandem_round_phase_seconds"
                counts = {phase: used[f"{name}_count", phase] for phase in PHASES}
                means = {
                    phase: used[f"{name}_sum", phase] / count for phase, count in counts.items() if count
                }
                outcomes = self.outcomes.get(("one-process", batch, temperature), [])
                joined = {
                    phase: [s for each in outcomes for s in each.phases.get(phase, ())] for phase in PHASES
                }
                own = {phase: statistics.fmean(seconds) for phase, seconds in joined.items() if seconds}
                lost = sum(means[each] - own[each] for each in ("draft", "verify")) if means and own else None
                for path, found, of_wire in (("services", means, lost), ("one process", own, None)):
                    if found:
                        figures = (*(found[phase] for phase in PHASES), sum(found.values()), of_wire)
                        rows.append((path, batch, temperature, *figures))
        where = ("path", ""), ("batch", ""), ("temperature", "number")
        seconds = ((name, "seconds") for name in (*PHASES, "round", "of it wire"))
        by_peer = ((f"{peer} service", "bytes") for peer in PEERS)
        return [
            Table.of("A round by phase, means", rows, *where, *seconds),
            Table.of("On the wire, for each token", wire, where[2], *by_peer),
        ]

    async def prefix(self) -> list[Table]:
        """Ask services of their own for one token after a new prefix, then for one after the same prefix and another
        ending: the times to the first token, and the median over rounds of the second by the first."""
        self.progress("a prefix that was served before")
        prompts = self.prompts
        times = list[list[float]]()
        endings = prompts[0][:ENDING_TOKENS], prompts[1][-ENDING_TOKENS:]
        async with models(self.setup, prefix_caching=True) as setup, start("speculative", setup) as contender:
            for number in range(min(self.settings.rounds, 3)):
                # Another text in each round, and other first tokens: nothing of it was served before.
                text = [*prompts[-1 - number], *chain.from_iterable(prompts[number:])]
                prefix = tuple(islice(cycle(text), PREFIX_TOKENS))
                outcomes = [await contender(Workload((prefix + each,), 0.0, 2)) for each in endings]
                times.append([outcome.answers[0].arrivals[0][0] for outcome in outcomes])
        ratio = statistics.median(again / first for first, again in times)
        spreads = [(statistics.median(each), min(each), max(each)) for each in zip(*times, strict=True)]
        rows = ("the first time", *spreads[0], None), ("again", *spreads[1], ratio)
        seconds = ((name, "seconds") for name in ("median", "lowest", "highest"))
        title = f"Time to first token, {PREFIX_TOKENS} tokens of prefix"
        return [Table.of(title, rows, ("prefix", ""), *seconds, ("by the first", "ratio"))]


def _read_step(line: str, start: float) -> PacedStep:
    """A step as `benchmarks.pace` notes it, in seconds since the start."""
    began, ended, _sequences, _tokens, role = line.split()
    return PacedStep(float(began) - start, float(ended) - start, role == "target")


def _totals(port: int) -> Counter[tuple[str, str]]:
    """Values of a coordinator's metrics by name, and by phase or peer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found: Counter[tuple[str, str]] = Counter()
    for sample in chain.from_iterable(family.samples for family in families):
        found[sample.name, sample.labels.get("phase", sample.labels.get("peer", ""))] += sample.value  # type: ignore[assignment]
    return found


def _machine(settings: BenchSettings, load_before: float) -> Machine:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "grpcio")}
    if importlib.util.find_spec("vllm"):
        versions["vllm"] = next(metadata.version(name) for name in metadata.packages_distributions()["vllm"])
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(
        processor=names[0] if names else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        device=settings.device,
        gpus=list_gpus(),
        load_before=round(load_before, 2),
        versions={"python": platform.python_version(), **versions},
    )


def list_gpus() -> tuple[str, ...]:
    """A line about each GPU; none where there is no nvidia-smi."""
    query = "index,name,memory.total,driver_version,power.limit,pcie.link.gen.max"
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    try:
        return tuple(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    except (OSError, subprocess.CalledProcessError):
        return ()
