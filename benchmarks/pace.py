"""Steps and messages with the timing of another machine, so that two cores can play two devices: they sleep.

    python -m benchmarks.pace --role target|draft --pace VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS] [--steps FILE] ...
                                                                    a model service, which notes its steps in the file
    python -m benchmarks.pace --role delay --to HOST:PORT --ms ONE_WAY                               a longer connection

Text and acceptance are real. A delayed connection is a process with a thread for each direction: an event loop's timers
are a millisecond wide, four times what a network between two machines of a rack takes.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TextIO

from pydantic import BeforeValidator, Field
from pydantic_settings import CliUnknownArgs, SettingsConfigDict

from tandem.config.rule import Rules, rule
from tandem.config.settings import load_settings
from tandem.serving.standard_streams import write_out
from tandem.telemetry.logs import LogLevel
from tandem_load.common import StudySettings, one_sentence

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.telemetry.streams import OnStep


def sleep_until(due: float) -> None:
    """Return at a moment of `time.perf_counter`, some 0.02 ms late. Other threads run meanwhile."""
    # The last part of a sleep is spent awake. `time.sleep` alone ends 0.08 to 0.17 ms late on a virtual machine.
    if (left := due - 0.0002 - time.perf_counter()) > 0.0:
        time.sleep(left)
    while time.perf_counter() < due:
        time.sleep(0.0)  # lets go of the interpreter


@dataclass(frozen=True, slots=True)
class Pace:
    """Minimum duration of steps."""

    verify_seconds: float
    """Duration of a target step with one row."""
    draft_step_seconds: float
    """Duration of a draft step with one row."""
    per_8_rows: float = 0.0
    """Share by which a step takes longer for each 8 tokens beyond the first."""

    @staticmethod
    def from_text(text: str) -> Pace:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or min(numbers[:2]) <= 0.0 or min(numbers) < 0.0:
            raise ValueError("it must be VERIFY_MS,DRAFT_STEP_MS or VERIFY_MS,DRAFT_STEP_MS,PER_8_ROWS")
        return Pace(numbers[0] / 1e3, numbers[1] / 1e3, *numbers[2:])

    def seconds(self, role: str, tokens: int) -> float:
        """Minimum seconds of a step with so many tokens. Role: target or draft."""
        one = self.verify_seconds if role == "target" else self.draft_step_seconds
        return one * (1.0 + self.per_8_rows * (tokens - 1) / 8.0)

    def paced(
        self,
        role: str,
        on_step: OnStep = None,
        sleep: Callable[[float], None] = sleep_until,
        steps: TextIO | None = None,
    ) -> Callable[[StepRecord], None]:
        """A step observer that sleeps before the results are delivered, so that steps take at least this long.

        It notes each step in `steps`: when it began and ended, by `time.perf_counter`, and its sequences and tokens.
        """

        def wait(step: StepRecord) -> None:
            began = time.perf_counter() - step.seconds
            if on_step is not None:
                on_step(step)
            sleep(began + self.seconds(role, step.token_count))
            if steps is not None:
                steps.write(f"{began} {time.perf_counter()} {step.sequence_count} {step.token_count}\n")

        return wait


def run_paced(role: str, pace: Pace, arguments: list[str], steps: TextIO | None = None) -> None:
    """Run a model service with these arguments whose steps take a minimum time. See `Pace.paced`."""
    import tandem_draft.__main__
    import tandem_draft.proposers.head_apart as head_apart
    import tandem_draft.proposers.standalone as standalone
    import tandem_target.__main__
    import tandem_target.loading as loading

    # The services look their loaders up by name when they load.
    is_apart = role == "draft" and "--target-features" in arguments
    module: Any = loading if role == "target" else head_apart if is_apart else standalone
    name = "load_verifier" if role == "target" else "load_head_apart" if is_apart else "load_standalone"
    load = getattr(module, name)

    def paced(settings: Any, on_step: Any = None, on_failure: Any = None) -> Any:
        # A target's own head takes the steps of a draft.
        head = {"on_head_step": pace.paced("draft")} if role == "target" else {}
        return load(settings, pace.paced(role, on_step, steps=steps), on_failure, **head)

    setattr(module, name, paced)
    (tandem_target.__main__ if role == "target" else tandem_draft.__main__).run(arguments)


def delay(address: str, seconds: float, port: int) -> None:
    """Listen on a port, and hold back for so long all that passes to and from a server."""
    host, _, far_port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", port)) as server:
        write_out(f"ready on 127.0.0.1:{server.getsockname()[1]}\n")
        while True:
            near, _ = server.accept()
            far = socket.create_connection((host, int(far_port)))
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=_read, args=(source, chunks, seconds), daemon=True).start()
                threading.Thread(target=_write, args=(sink, chunks), daemon=True).start()


def _read(source: socket.socket, chunks: queue.SimpleQueue[tuple[float, bytes]], seconds: float) -> None:
    """Queue each chunk with the moment at which it is due; an empty chunk is the end."""
    data = b"."
    while data:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        chunks.put((time.perf_counter() + seconds, data))


def _write(sink: socket.socket, chunks: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with suppress(OSError):  # the other end is gone
        while True:
            due, data = chunks.get()
            sleep_until(due)
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)


@rule("A service has a pace.")
def _pace(settings: PaceSettings) -> Iterator[str]:
    if settings.role != "delay" and settings.pace is None:
        yield f"role is {settings.role}; it needs --pace"


class PaceSettings(StudySettings):
    """Run a model service whose steps take as long as on another machine, or a connection that is longer."""

    model_config = SettingsConfigDict(cli_ignore_unknown_args=True)

    env_prefix: ClassVar = "TANDEM_PACE_"

    role: Literal["target", "draft", "delay"]
    """The service, which gets all other options; or delay, a longer connection."""
    pace: Annotated[Pace, BeforeValidator(Pace.from_text)] | None = None
    """VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]: minimum duration of steps."""
    steps: Path | None = None
    """File that each step is noted in."""
    arguments: CliUnknownArgs
    """The other words."""

    own_rules: ClassVar[Rules] = (_pace,)


class DelaySettings(StudySettings):
    """Hold back what passes to and from a server."""

    env_prefix: ClassVar = "TANDEM_DELAY_"

    to: str
    """HOST:PORT of the server."""
    ms: float = Field(ge=0)
    """Milliseconds of delay, one way."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    log_level: LogLevel = "warning"
    """Without effect: services are started with it."""


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process."""
    program = "python -m benchmarks.pace"
    with one_sentence():
        settings = load_settings(PaceSettings, arguments, program)
        if settings.role == "delay":
            way = load_settings(DelaySettings, settings.arguments, program)
            with suppress(KeyboardInterrupt):
                delay(way.to, way.ms / 1e3, way.port)
            return
        assert settings.pace is not None, "a rule"
        steps = None if settings.steps is None else settings.steps.open("a", buffering=1)
        run_paced(settings.role, settings.pace, settings.arguments, steps)


if __name__ == "__main__":
    main(sys.argv[1:])
