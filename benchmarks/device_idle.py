"""`python -m benchmarks.device_idle`: how long a device waits for its host between two steps of a target service.

    python -m benchmarks.device_idle --batch 1,4,16,64 --step-ms 8

The device is a stand-in that only takes time: a step is launched and returns, and the host waits for it where it reads
the rows. All else is the target service, in a process of its own over gRPC: `asked` with a client that asks for each
step when it has the answer to the one before, `led` with a target that goes on by itself behind its own head's
proposals, which cost nothing here.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TextIO

import grpc.aio
import torch
import uvloop
from pydantic import Field
from pydantic_settings import CliUnknownArgs, SettingsConfigDict
from torch import Tensor

from tandem.config.settings import load_settings
from tandem.engine.core.engine import RowEngine
from tandem.engine.core.jobs import Job
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry, arena_pages
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.rows import LaunchedRows, launch_rows
from tandem.engine.steps import Packing, StepBackend
from tandem.model.types import (
    AcceptanceTerms,
    Delta,
    Finish,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingParams,
    StepProfile,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire
from tandem_load.common import Listed, Positive, StudySettings, one_sentence, print_row, process

TOKEN = 7
"""The most probable token, wherever it is asked for."""
PROPOSED = 4
"""Tokens of each proposal, all of which are accepted."""
LEAD = 4
"""Steps that a target may go on by itself."""
PROMPT = (TOKEN,) * 16
VOCABULARY_SIZE = 512
MAX_LENGTH = 1 << 14
SKIPPED_STEPS = 20
"""First steps of a run, which are not counted."""


# ---- a model on a device that only takes time


class Device(Protocol):
    """Runs steps one after the other, whatever they are."""

    def launch(self, sequence_count: int) -> None:
        """Begin a step behind those before it; returns at once."""

    def wait(self) -> None:
        """Return when all steps have ended."""


class TimedDevice:
    """Takes the same time for each step, and notes how long it had nothing to do before."""

    def __init__(self, seconds: float, notes: TextIO) -> None:
        self._seconds = seconds
        self._notes = notes
        self._busy_until = time.perf_counter()
        self._returned_at = self._busy_until
        self._used = _processor_times()

    def launch(self, sequence_count: int) -> None:
        """See `Device`."""
        now = time.perf_counter()
        began = max(now, self._busy_until)
        idle = began - self._busy_until
        late = self._returned_at - self._busy_until
        used = [end - begin for begin, end in zip(self._used, _processor_times(), strict=True)]
        self._notes.write(" ".join(map(str, (now, idle, late, sequence_count, *used))) + "\n")
        self._busy_until = began + self._seconds

    def wait(self) -> None:
        """See `Device`."""
        left = self._busy_until - time.perf_counter()
        if left > 0.0:
            time.sleep(left)
        self._returned_at = time.perf_counter()
        self._used = _processor_times()


def _processor_times() -> tuple[float, float]:
    """Processor seconds of this thread so far, and of the process's others."""
    own = time.thread_time()
    return own, time.process_time() - own


class StandInSteps(StepBackend):
    """Writes down what each step holds, as any backend does, and launches it."""

    warm_up_steps = ((1,),)

    def __init__(self, device: Device, *, returns_early: bool) -> None:
        self._device = device
        self.returns_early = returns_early

    def run(self, segments: Sequence[Segment], rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), VOCABULARY_SIZE], which nobody may read before `Device.wait` has returned."""
        packing = Packing(segments)
        packing.token_ids()
        packing.positions()
        packing.spans(0)
        self._device.launch(len(segments))
        logits = torch.zeros(len(rows), VOCABULARY_SIZE)
        logits[:, TOKEN] = 1.0
        return logits


@dataclass(frozen=True)
class RowsOnDevice:
    """Rows of which the host knows nothing before the device has run their step."""

    device: Device
    rows: LaunchedRows

    def read(self) -> list[Verification | None]:
        """See `PendingRows`."""
        self.device.wait()
        return self.rows.read()


class StandInModel:
    """See `tandem.engine.steps.ModelRunner`."""

    info = ModelInfo("stand-in", "StandIn", VOCABULARY_SIZE, "", MAX_LENGTH, "float32")
    device = torch.device("cpu")

    def __init__(self, device: Device, *, returns_early: bool = True) -> None:
        """
        Args:
            returns_early: False to have the engine treat its steps as those of a CPU.
        """
        self._device = device
        self._returns_early = returns_early

    def allocate(self, settings: EngineSettings, max_length: int) -> tuple[PagedCache, StandInSteps]:
        """See `ModelRunner`: a real cache, of a layer that keeps next to nothing."""
        layers = (LayerGeometry(1, 1, 1),)
        pages = arena_pages(layers, settings, max_length, torch.float32, self.device)
        arena = KvArena(layers, pages, torch.float32, self.device)
        return PagedCache(arena), StandInSteps(self._device, returns_early=self._returns_early)

    def launch_rows(self, requests: Sequence[RowRequest], logits: Tensor) -> RowsOnDevice:
        """See `ModelRunner`."""
        return RowsOnDevice(self._device, launch_rows(requests, logits))

    def are_finite(self, logits: Tensor) -> bool:
        """See `ModelRunner`."""
        self._device.wait()
        return True

    def close(self) -> None:
        """It holds nothing."""


class StandInHead:
    """A drafting head that is always right and takes no time. See `Drafter` and `OwnHead`."""

    overdue_seconds = 0.0
    step_profile = StepProfile()

    async def start(self) -> None:
        """There is nothing to load."""

    async def close(self) -> None:
        """It holds nothing."""

    def propose(self, jobs: Sequence[Job[Any]]) -> list[Proposal]:
        """See `Drafter`."""
        return [Proposal(job.sequence.length + 1, (TOKEN,) * PROPOSED) for job in jobs]

    def begin(self, job: Job[Any]) -> None:
        """It reads nothing."""

    def begin_step(self) -> None:
        """It reads nothing."""

    def release(self, sequence: CachedSequence) -> None:
        """It keeps nothing."""


def serve(settings: IdleSettings, notes: TextIO) -> None:
    """Run a target service with the stand-in, until a signal ends it."""
    import tandem_target.__main__
    import tandem_target.loading as loading
    from tandem_target.settings import TargetSettings
    from tandem_target.verifier import Verifier

    device = TimedDevice(settings.step_ms / 1e3, notes)
    model = StandInModel(device, returns_early=not settings.answers_first)

    def load(given: TargetSettings, on_step: Any = None, on_failure: Any = None) -> Verifier:
        head = StandInHead()
        limits = EngineSettings.of(given)
        engine = RowEngine(model, limits, on_step, on_failure=on_failure, drafter=head)
        return Verifier(engine, [], own_head=head)

    replaced: Any = loading  # the service looks its loader up by name when it loads
    replaced.load_verifier = load
    tandem_target.__main__.run(["--model", str(settings.model), *settings.arguments])


# ---- a coordinator that does nothing else


class Case(NamedTuple):
    """One run."""

    is_led: bool
    batch: int
    step_count: int

    def first_step(self) -> VerifyStep:
        """The step behind the prompt."""
        if self.is_led:
            return VerifyStep(Delta(0, PROMPT), RowKind.TOKEN, 1, lead=LEAD, serial=1, own_tokens=PROPOSED)
        return VerifyStep(Delta(0, PROMPT), RowKind.TOKEN, 1, serial=1)

    def next_step(self, answer: wire.Answer, serial: int) -> VerifyStep:
        """The step behind an answer."""
        if self.is_led:
            assert answer.goes_on is not None, "every proposal is right"
            delta = answer.goes_on.delta
            return VerifyStep(delta, RowKind.TOKEN, 1, lead=LEAD, serial=serial, own_tokens=PROPOSED)
        length = len(PROMPT) + (serial - 2) * (PROPOSED + 1)
        return VerifyStep(
            Delta(length, (TOKEN,) * (PROPOSED + 1)), RowKind.TOKEN, PROPOSED + 1, serial=serial
        )


async def play(address: str, case: Case) -> tuple[float, float]:
    """Take the steps of a case on one stream, all sequences at once; when it began and ended, by `perf_counter`."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream = TargetServiceStub(channel).Verify()
        options = TargetOptions(
            "device idle", SamplingParams(0.0), MAX_LENGTH, prompt_length=len(PROMPT),
            acceptance=AcceptanceTerms("greedy"),
        )  # fmt: skip
        sequences = range(1, case.batch + 1)
        opened: list[tuple[int, Any]] = []
        for sequence in sequences:
            opened += [(sequence, options), (sequence, case.first_step())]
        began = time.perf_counter()
        await stream.write(wire.requests_to_proto(opened))
        serials = dict.fromkeys(sequences, 1)
        while serials:
            message: Any = await stream.read()
            asked: list[tuple[int, Any]] = []
            for sequence, answer in wire.answers_from_proto(message):
                if sequence not in serials:
                    continue  # it has gone on by itself behind its last step
                assert isinstance(answer, wire.Answer), answer
                serials[sequence] += 1
                if serials[sequence] > case.step_count:
                    del serials[sequence]
                    asked.append((sequence, Finish(0)))
                else:
                    asked.append((sequence, case.next_step(answer, serials[sequence])))
            if asked:
                await stream.write(wire.requests_to_proto(asked))
        ended = time.perf_counter()
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
    return began, ended


# ---- figures


@dataclass(frozen=True)
class Idle:
    """Idle times of a run's steps."""

    milliseconds: float
    """Median from a step's end to the next one's launch."""
    late_milliseconds: float
    """Median of the part until the engine's thread runs again."""
    share: float
    """Share of the device's time in which it had nothing to do."""
    sequences: float
    """Mean of a step."""
    engine_milliseconds: float
    """Median processor time of the engine's thread while the device was idle."""
    other_milliseconds: float
    """The same of the other threads, the event loop above all."""


def idle_of(notes: str, began: float, ended: float, step_seconds: float) -> Idle:
    """Figures of the steps that were launched in this time, all but the first ones."""
    steps = [tuple(map(float, line.split())) for line in notes.splitlines()]
    own = [step for step in steps if began <= step[0] <= ended][SKIPPED_STEPS:]
    idle = [step[1] for step in own]
    return Idle(
        milliseconds=1e3 * statistics.median(idle),
        late_milliseconds=1e3 * statistics.median(step[2] for step in own),
        share=sum(idle) / (sum(idle) + step_seconds * len(own)),
        sequences=statistics.mean(step[3] for step in own),
        engine_milliseconds=1e3 * statistics.median(step[4] for step in own),
        other_milliseconds=1e3 * statistics.median(step[5] for step in own),
    )


async def measure(settings: IdleSettings) -> None:
    """Print a row for each case."""
    print_row(
        *("steps", "sequences", "idle ms", "of it until the host runs", "idle share", "sequences a step"),
        *("processor ms of the engine's thread", "of the event loop"),
    )
    print_row("---", *["---:"] * 7)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "steps"
        words = ["--serve", str(notes), "--step-ms", str(settings.step_ms), "--model", str(settings.model)]
        words += ["--max-sequences", str(max(settings.batch)), "--threads", "1"]
        if settings.answers_first:
            words.append("--answers-first")
        async with process("benchmarks.device_idle", *words) as (address, _):
            for is_led in (False, True):
                for batch in settings.batch:
                    runs = []
                    for _ in range(settings.rounds):
                        times = await play(address, Case(is_led, batch, settings.steps))
                        runs.append(idle_of(notes.read_text(), *times, settings.step_ms / 1e3))
                    own = sorted(runs, key=lambda run: run.share)[len(runs) // 2]
                    print_row(
                        "led" if is_led else "asked",
                        batch,
                        f"{own.milliseconds:.2f}",
                        f"{own.late_milliseconds:.2f}",
                        f"{own.share:.1%}",
                        f"{own.sequences:.1f}",
                        f"{own.engine_milliseconds:.2f}",
                        f"{own.other_milliseconds:.2f}",
                    )


class IdleSettings(StudySettings):
    """Options of the measurement."""

    model_config = SettingsConfigDict(cli_ignore_unknown_args=True)

    env_prefix: ClassVar = "TANDEM_IDLE_"

    batch: Listed[Positive] = (1, 4, 16, 64)
    """Sequences at once."""
    step_ms: float = Field(default=8.0, gt=0)
    """Milliseconds of a step."""
    steps: int = Field(default=200, ge=2 * SKIPPED_STEPS)
    """Steps of each sequence."""
    rounds: Positive = 3
    """Runs of each case, of which the middle one is printed."""
    answers_first: bool = False
    """Send a step's answers before the next one is launched, as where a CPU takes the steps."""
    model: Path = Path("models/demo/target")
    """Folder that the service takes for a model; nothing in it is read."""
    serve: Path | None = None
    """File to note steps in, as the service. The measurement starts itself with it."""
    arguments: CliUnknownArgs
    """The service's other options."""


def main() -> None:
    """Measure, and print a table; or serve."""
    with one_sentence():
        settings = load_settings(IdleSettings, sys.argv[1:], "python -m benchmarks.device_idle")
        if settings.serve is None:
            uvloop.run(measure(settings))
            return
        with settings.serve.open("a", buffering=1) as notes:
            serve(settings, notes)


if __name__ == "__main__":
    main()
