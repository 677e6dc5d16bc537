"""`tandem bench`: its options, and one run that starts everything and lets all contenders do the same in turn."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import uvloop
from pydantic import BeforeValidator, Field, ValidationError
from rich.console import Console

from benchmarks import steps
from benchmarks.common import CACHE_FOLDER, Contender, chosen, rotated
from benchmarks.contenders import CONTENDERS, Addresses, Setup, services, through
from benchmarks.pace import Pace
from benchmarks.pairs import Pair, open_pair
from benchmarks.peers import Outcome, Workload
from benchmarks.report import (
    Cell,
    Machine,
    PhaseRow,
    PrefixGain,
    Report,
    StepRow,
    WireBytes,
    cell_of,
    show,
    write,
)
from benchmarks.timing import PHASES, PREFIX_TOKENS, phase_row, prefix_gain, timed_coordinator
from coordinator.cli.app import exit_code
from tandem.config.options import Options, sentences
from tandem.errors import ConfigurationError, TandemError
from tandem.logs import configure
from tandem.standard_streams import exit_with

REFERENCE = "target-alone"
_FLAGS = {"json_file": "--json", "markdown_file": "--markdown"}
"""Options whose plain name would hide a method of the class."""
_MACHINES_OWN = ("--vllm-python", "--max-python", "--cache-folder")
"""Options whose values mean nothing on other machines."""


def _listed(value: Any) -> Any:
    """A list as the command line writes it: 1,4,16."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _known(name: str) -> str:
    if name not in CONTENDERS:
        raise ValueError(f"there is no contender {name!r}; it must be one of {', '.join(CONTENDERS)}")
    return name


def _paced(text: str) -> str:
    if text:
        Pace.from_text(text)
    return text


Positive = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]
ContenderName = Annotated[str, BeforeValidator(_known)]
NonEmpty = Field(min_length=1)


class BenchSettings(Options):
    """Options of a comparison."""

    pair: str = "demo"
    """demo, TARGET:DRAFT (folders or Hugging Face ids), or shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for
    instance shaped:200M:1:0.8: random weights with the shape of Llama 3.1, whose draft agrees that often."""
    contenders: Annotated[tuple[ContenderName, ...], BeforeValidator(_listed), NonEmpty] = tuple(CONTENDERS)
    """Ways of decoding to compare, without those of an engine whose Python is not given."""
    batch: Annotated[tuple[Positive, ...], BeforeValidator(_listed), NonEmpty] = (1, 4, 16)
    """Requests at once."""
    temperature: Annotated[tuple[Temperature, ...], BeforeValidator(_listed), NonEmpty] = (0.0, 1.0)
    """0 is greedy."""
    rounds: int = Field(default=5, ge=1)
    """Number of times that each contender completes each batch, in turn with the others."""
    max_tokens: int = Field(default=64, ge=2)
    """Tokens of each completion."""
    num_speculative_tokens: int = Field(default=4, ge=1)
    """Tokens proposed per verification."""
    rule: str = ""
    """rejection_sampling_strategy of Tandem's contenders. By default the coordinator's."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type that every contender computes in."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each model. By default one for each core."""
    device: str = "cpu"
    """Device of the models: cpu, cuda or cuda:N."""
    draft_device: str = ""
    """Device of the draft service of Tandem's contenders. By default the target's."""
    engine: Literal["", "tandem", "vllm"] = ""
    """Engine of Tandem's services. By default their own choice."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of the target, with the engine vllm and for vLLM itself."""
    pace: Annotated[str, BeforeValidator(_paced)] = ""
    """VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]: minimum duration of the steps of Tandem's and vLLM's contenders (they
    sleep), and a share more for each 8 tokens; for instance 6.5,1.2,0.1."""
    delay: float = Field(default=0.0, ge=0)
    """Milliseconds of delay between the coordinator and a service, one way."""
    fresh: bool = False
    """Start the services again for each completion of Tandem's contenders, without a warm-up, so that nothing has been
    learned from earlier ones. No phases are measured then. Completions of more than 100 tokens report the first 100
    apart."""
    prefix: bool = True
    """Measure the gain for a prompt whose first 512 tokens were served before."""
    phases: bool = True
    """Measure the phases of a round, and bytes on the wire."""
    steps: bool = False
    """Measure steps of the engine, beside torch's own and the time to read the weights once."""
    head: Path | None = None
    """Folder of a drafting head for the target, for the contenders that draft with one. By default the head bundled
    with it, a folder beside it with the method's name."""
    vllm_python: Path | None = None
    """A Python that has vLLM."""
    vllm_eager: bool = False
    """Run vLLM without torch.compile, also as an engine: it starts in seconds, and is slower."""
    max_python: Path | None = None
    """A Python that has MAX; on a CPU it computes in float32 only."""
    cache_folder: Path = CACHE_FOLDER
    """Folder of shaped pairs."""
    json_file: Path | None = None
    """Write everything that was measured to this file."""
    markdown_file: Path | None = None
    """Write the tables to this file."""
    note: str = ""
    """A sentence about the circumstances, for the report."""

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    @property
    def model_threads(self) -> int:
        """Threads of each model, with the default decided."""
        return self.threads or self.cores


def parse(arguments: Sequence[str], program: str = "tandem bench") -> BenchSettings:
    """The settings of a command line.

    Raises:
        ConfigurationError: with every wrong option, its value and what it must be.
        SystemExit: --help was asked for, or there is no such option.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description="Measure ways of decoding with the same weights and prompts, in turn, on this machine.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, option in BenchSettings.model_fields.items():
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        help_text = f"{option.description} [default: {_shown(option.default)}]".replace("%", "%%")
        if option.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=help_text)
        else:
            parser.add_argument(flag, dest=name, metavar=name.split("_")[-1].upper(), help=help_text)
    try:
        return BenchSettings(**vars(parser.parse_args(arguments)))
    except ValidationError as error:
        raise ConfigurationError("; ".join(sentences(error))) from None


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    errors = Console(stderr=True)
    try:
        settings = parse(arguments, program)
        configure("warning", "text")
        with errors.status("") as status:
            progress = status.update if errors.is_terminal else lambda _: None
            report = uvloop.run(measure(settings, progress, recorded_command(program, arguments)))
    except TandemError as error:
        exit_with(error, exit_code(error))
        return
    except KeyboardInterrupt:
        sys.exit(130)
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
    """Measure what the settings ask for.

    Raises:
        TandemError: a service of ours could not start or failed. Another engine's failure is part of the report.
    """
    load_before = os.getloadavg()[0]
    progress("preparing the models")
    pair = open_pair(settings.pair, settings.cache_folder, settings.device)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        run = _Run(settings, _setup(settings, pair, logs), pair.prompts(), progress)
        step_rows = await run.steps() if settings.steps else ()
        progress("starting the services")
        # With --fresh no services run beside those that are measured, unless another engine drafts by them.
        addresses = Addresses("", "", "", "")
        if not settings.fresh or any(name.startswith("vllm-tandem") for name in settings.contenders):
            addresses = await stack.enter_async_context(services(run.setup, with_ahead=run.with_ahead))
        await run.rounds(await run.start(addresses, stack))
        phases, wire = await run.phases(addresses) if settings.phases and not settings.fresh else ((), ())
        prefix = await run.prefix() if settings.prefix else None
    return Report(
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
        steps=step_rows,
        absent=run.absent,
    )


def _setup(settings: BenchSettings, pair: Pair, logs: Path) -> Setup:
    # Room for what follows a prefix
    longest = max(max(map(len, pair.prompts())) + settings.max_tokens, PREFIX_TOKENS + 32)
    count = settings.num_speculative_tokens
    return Setup(
        target=pair.target,
        draft=pair.draft,
        dtype=settings.dtype,
        threads=settings.model_threads,
        device=settings.device,
        draft_device=settings.draft_device,
        serving_engine=settings.engine,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_length=longest + 2 * count,  # vLLM asks no proposer so near to the longest length
        max_sequences=max(*settings.batch, 2),
        num_speculative_tokens=count,
        logs=logs,
        rule=settings.rule,
        vllm_python=settings.vllm_python,
        vllm_eager=settings.vllm_eager,
        max_python=settings.max_python,
        pace=settings.pace,
        delay_ms=settings.delay,
        head=settings.head,
    )


@dataclass(slots=True)
class _Run:
    settings: BenchSettings
    setup: Setup
    prompts: Sequence[tuple[int, ...]]
    progress: Callable[[str], None]
    outcomes: dict[tuple[str, int, float], list[Outcome]] = field(default_factory=dict)
    """By contender, batch and temperature."""
    absent: dict[str, str] = field(default_factory=dict)
    """Reason of each contender that did not take part, or failed."""

    async def steps(self) -> tuple[StepRow, ...]:
        """Steps of both models' engines, each in a process that is gone before the services start."""
        found: list[StepRow] = []
        for role in ("target", "draft"):
            self.progress(f"steps of the {role}")
            found += await steps.measured(role, self.setup)
        return tuple(found)

    async def start(self, addresses: Addresses, stack: AsyncExitStack) -> dict[str, Contender]:
        """Start those that can start."""
        started: dict[str, Contender] = {}
        for name in self.settings.contenders:
            kind = CONTENDERS[name]
            if reason := kind.absent(self.setup):
                self.absent[name] = reason
            if reason or self._is_fresh(name):
                continue
            self.progress(f"starting {kind.title}")
            try:
                started[name] = await stack.enter_async_context(kind.start(self.setup, addresses))
            except TandemError as error:
                self._failed(name, error)
        return started

    @property
    def with_ahead(self) -> bool:
        """True if a second coordinator is needed, which drafts ahead."""
        return "speculative-ahead" in self.settings.contenders

    def _is_fresh(self, name: str) -> bool:
        return self.settings.fresh and CONTENDERS[name].is_ours and name != "one-process"

    async def _run(self, name: str, started: dict[str, Contender], workload: Workload) -> Outcome:
        if not self._is_fresh(name):
            return await started[name].run(workload)
        async with (
            services(self.setup, with_ahead=self.with_ahead) as addresses,
            CONTENDERS[name].start(self.setup, addresses) as contender,
        ):
            return await contender.run(workload)

    def _failed(self, name: str, error: TandemError) -> None:
        if CONTENDERS[name].is_ours:
            raise error
        self.absent[name] = str(error)

    def _cells(self) -> Iterator[tuple[int, float]]:
        for batch in self.settings.batch:
            for temperature in self.settings.temperature:
                yield batch, temperature

    async def rounds(self, started: dict[str, Contender]) -> None:
        """Run the rounds, and one before them to warm up."""
        for number in range(-1, self.settings.rounds):
            for batch, temperature in self._cells():
                tokens = self.settings.max_tokens if number >= 0 else 8
                prompts = chosen(self.prompts, batch, max(number, 0))
                workload = Workload(prompts, temperature, tokens, seed=1000 * (number + 1))
                for name in rotated(self.settings.contenders, number):
                    kind = CONTENDERS[name]
                    is_cold = number < 0 and self._is_fresh(name)
                    if name in self.absent or is_cold or batch > (kind.largest_batch or batch):
                        continue
                    what = f"round {number + 1} of {self.settings.rounds}" if number >= 0 else "warm-up"
                    self.progress(f"{what}: batch {batch}, temperature {temperature:g}, {kind.title}")
                    # The threads of the last one may spin for a moment after their last step
                    await asyncio.sleep(0.2)
                    try:
                        outcome = await self._run(name, started, workload)
                    except TandemError as error:
                        self._failed(name, error)
                        continue
                    if number >= 0:
                        self.outcomes.setdefault((name, batch, temperature), []).append(outcome)

    def cells(self) -> tuple[Cell, ...]:
        """The figures of each contender that finished its rounds."""
        return tuple(
            cell_of(*key, outcomes, self.outcomes.get((REFERENCE, *key[1:]), []))
            for key, outcomes in self.outcomes.items()
            if key[0] not in self.absent
        )

    async def phases(self, addresses: Addresses) -> tuple[tuple[PhaseRow, ...], tuple[WireBytes, ...]]:
        """Phases of rounds, and bytes for each token at the first batch: through the services by a coordinator of its
        own; in one process from the rounds that were run."""
        rows: list[PhaseRow] = []
        wire: list[WireBytes] = []
        async with timed_coordinator(self.setup, addresses) as coordinator:
            for batch, temperature in self._cells():
                self.progress(f"where the time goes: batch {batch}, temperature {temperature:g}")
                prompts = chosen(self.prompts, batch, 0)
                workload = Workload(prompts, temperature, self.settings.max_tokens)
                await coordinator.run(workload)  # to warm up
                phases, counted = await coordinator.run(workload)
                wire += [counted] if batch == self.settings.batch[0] else []
                rows += phase_row("services", batch, temperature, phases)
                outcomes = self.outcomes.get(("one-process", batch, temperature), [])
                joined = {
                    name: [s for each in outcomes for s in each.phases.get(name, ())] for name in PHASES
                }
                means = {name: statistics.fmean(seconds) for name, seconds in joined.items() if seconds}
                rows += phase_row("one process", batch, temperature, means)
        return tuple(rows), tuple(wire)

    async def prefix(self) -> PrefixGain:
        """Time to the first token after a prefix that was served before, by services of their own."""
        self.progress("a prefix that was served before")
        async with (
            services(self.setup, prefix_caching=True, with_ahead=False) as addresses,
            through(addresses.coordinator) as contender,
        ):
            return await prefix_gain(contender, self.prompts, min(self.settings.rounds, 3))


def _machine(settings: BenchSettings, load_before: float) -> Machine:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "grpcio")}
    if importlib.util.find_spec("vllm"):
        versions["vllm"] = next(metadata.version(name) for name in metadata.packages_distributions()["vllm"])
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
