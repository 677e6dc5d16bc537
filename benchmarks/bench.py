"""`tandem bench`: its options, and the way from them to tables and files."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from pydantic import BeforeValidator, Field, ValidationError
from rich.console import Console

from benchmarks.common import CACHE_FOLDER
from benchmarks.contenders import CONTENDERS
from benchmarks.pace import Pace
from benchmarks.report import Report, show, write
from coordinator.cli.command import exit_code
from tandem.config.options import Options, sentences
from tandem.errors import ConfigurationError, TandemError
from tandem.logs import configure
from tandem.settings import exit_with

_FLAGS = {"json_file": "--json", "svg_file": "--svg", "markdown_file": "--markdown"}
"""Options whose plain name would hide a method of the class."""


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
    """Measurements."""

    pair: str = "demo"
    """demo, TARGET:DRAFT (two folders), or shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for instance
    shaped:200M:1:0.8: random weights with the shape of Llama 3.1, whose draft agrees that often."""
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
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type that every contender computes in."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each model. By default one for each core."""
    device: str = "cpu"
    """Device of the models: cpu, cuda or cuda:N."""
    draft_device: str = ""
    """Device of the draft service of Tandem's contenders. By default the target's."""
    pace: Annotated[str, BeforeValidator(_paced)] = ""
    """VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]: minimum duration of the steps of Tandem's contenders (they sleep), and a
    share more for each 8 tokens; for instance 6.5,1.2,0.1."""
    delay: float = Field(default=0.0, ge=0)
    """Milliseconds of delay between the coordinator and a service, one way."""
    fresh: bool = False
    """Start the services again for each completion of Tandem's contenders, so that none has learned from earlier ones.
    There is no warm-up round then."""
    prefix: bool = True
    """Measure the gain for a prompt whose first 512 tokens were served before."""
    phases: bool = True
    """Measure the phases of a round, and bytes on the wire."""
    head: Path | None = None
    """Folder of a drafting head for the target, for the contenders that draft with one. By default the head bundled
    with it, a folder beside it with the method's name."""
    vllm_python: Path | None = None
    """A Python that has vLLM."""
    max_python: Path | None = None
    """A Python that has MAX; on a CPU it computes in float32 only."""
    cache_folder: Path = CACHE_FOLDER
    """Folder of shaped pairs."""
    json_file: Path | None = None
    """Write everything that was measured to this file."""
    svg_file: Path | None = None
    """Write a chart to this file."""
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
    for name, field in BenchSettings.model_fields.items():
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        help_text = f"{field.description} [default: {_shown(field.default)}]".replace("%", "%%")
        if field.annotation is bool:
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


_MACHINES_OWN = ("--vllm-python", "--max-python", "--cache-folder")
"""Options whose values mean nothing on other machines."""

_WIDTH = 132
"""Width of tables in a pipe or a file, in characters."""


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    try:
        settings = parse(arguments, program)
        configure("warning", "text")
        report = uvloop.run(_measure(settings, recorded_command(program, arguments)))
    except TandemError as error:
        exit_with(error, exit_code(error))
        return
    except KeyboardInterrupt:
        sys.exit(130)
    console = Console()
    show(console if console.is_terminal else Console(width=_WIDTH), report)
    write(report, settings.json_file, settings.svg_file, settings.markdown_file)


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


async def _measure(settings: BenchSettings, command: str) -> Report:
    # Not before the options were understood: torch takes seconds to import.
    from benchmarks.measure import measure

    console = Console(stderr=True)
    with console.status("") as status:
        return await measure(settings, status.update if console.is_terminal else _say, command)


def _say(_: str) -> None:
    """Print progress on a terminal."""
