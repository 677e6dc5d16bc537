"""`tandem bench --clients N`: sends a load, and reports what came back.

Options are named as those of `vllm bench serve`; without a server to load, a coordinator before scripted services runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.common import free_port, process
from benchmarks.load.clients import (
    Connect,
    Connection,
    LoadRequest,
    grpc_connection,
    http_connection,
    origin_of,
    served_model,
)
from benchmarks.load.figures import (
    BETWEEN,
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Arrival,
    Counts,
    Figures,
    Goodput,
    Lengths,
    Served,
    arrivals,
    figures,
    quantiles,
    waits_of,
)
from coordinator.cli.app import exit_code
from coordinator.cli.serve import SERVICES
from tandem.errors import TandemError
from tandem.rpc.credentials import Credentials
from tandem.standard_streams import exit_with

DESCRIPTION = """`tandem bench --clients N`: a load on a coordinator or on any OpenAI-compatible server.

    tandem bench --clients 64 --rate 20 --goodput ttft:500 itl:50
    tandem bench --clients 64 --address 127.0.0.1:50051 --json load.json
    tandem bench --clients 64 --http http://127.0.0.1:8000

Without --address and --http a coordinator runs before two scripted services, so that no model is measured. Requests
arrive as a Poisson process and have log-normal lengths; --seed decides both. Options are named as those of `vllm bench
serve`."""
RULES = ("greedy", "strict", "residual", "block")
_FIRST_ID, _IDS = 300, 1000
"""Prompts consist of these ids: lower ones are special tokens and single bytes."""
_PLACES = {
    "event_loop": "an answer, to be read",
    "answer": "a round, to go on with its answer",
    BETWEEN: "a round, from acceptance to its question",
    "question": "a question, to be written",
}
"""The places where a round waits in the coordinator, in its order."""


def parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """Read the command line; wrong options end the process with a sentence."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    lengths: Any = {"type": checked(Lengths.parse), "metavar": "MEDIAN[:SIGMA[:MAXIMUM]]"}
    add = parser.add_argument
    add("--clients", type=_positive, default=64, help="connections, each with one request at once")
    add("--rate", type=_rate, default=math.inf, help="requests a second [default: as many as clients take]")
    add("--requests", type=_positive, help="[default: four for each client]")
    add("--seed", type=int, default=0, help="of arrivals and lengths")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds of ttft, tpot, itl or e2el")
    add("--percentiles", type=_percents, default=[50.0, 90.0, 99.0], help="[default: 50,90,99]")
    add("--prompt-tokens", default=SHAREGPT_PROMPTS, help="[default: as ShareGPT's chats]", **lengths)
    add("--output-tokens", default=SHAREGPT_OUTPUTS, help="[default: as ShareGPT's chats]", **lengths)
    add("--temperature", type=float, help="[default: that of the rule; 0 at an address]")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--address", metavar="HOST:PORT", help="a coordinator that runs [default: start one]")
    add(
        "--http",
        type=checked(origin_of),
        metavar="URL",
        help="an OpenAI-compatible server that runs, such as vLLM's",
    )
    add("--model", help="model to ask for over HTTP [default: the first that the server lists]")
    add("--token-file", type=checked(_file), help="file with the token for it")
    add = parser.add_argument_group(
        "of the coordinator that is started without --address and --http"
    ).add_argument
    add("--rule", choices=RULES, default="greedy", help="acceptance rule above temperature 0")
    add("--over", choices=("grpc", "http"), default="grpc", help="what clients speak [default: grpc]")
    add("--workers", type=_positive, default=1)
    add("--measure-waits", action="store_true", help="measure where rounds wait in the coordinator")
    add("--stream-interval", type=_positive, default=1)
    add("--num-speculative-tokens", type=_positive, default=4)
    add("--acceptance", type=float, default=0.72, help="share of positions where the scripted draft is right")
    add("--verify-ms", type=float, default=5.0, help="duration of a step of the scripted target")
    add("--draft-ms", type=float, default=1.0, help="duration of a scripted proposal")
    options = parser.parse_args(arguments)
    try:
        options.bounds = Goodput.parse(options.goodput)
    except ValueError as error:
        parser.error(f"argument --goodput: {error}")
    if options.http is not None and options.address:
        parser.error("--address and --http name two servers; give one of them")
    if options.over == "http" and (options.address or options.http is not None):
        parser.error("--over http is about a coordinator that is started; a server that runs has --http URL")
    return options


def shown(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON has them, without what names a file of this machine."""
    hidden = ("bounds", "json", "token_file")
    found = {name: value for name, value in vars(options).items() if name not in hidden}
    found["rate"] = None if math.isinf(options.rate) else options.rate
    return found | {name: asdict(found[name]) for name in ("prompt_tokens", "output_tokens")}


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show the sentence of a ValueError."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reading


def _number(text: str, kind: type, is_right: Callable[[float], bool], words: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return value


def _positive(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "must be a whole number of at least 1"))


def _rate(text: str) -> float:
    return float(_number(text, float, lambda value: value > 0, "must be a number above 0, or inf"))


def _percents(text: str) -> list[float]:
    words = "must be numbers from 0 to 100 with commas between them"
    return [_number(part, float, lambda value: 0 <= value <= 100, words) for part in text.split(",")]


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise ValueError(f"{text!r} must be a file that can be read")
    return Path(text)


@dataclass(frozen=True, slots=True)
class Used:
    """Resources that one process used, its children included."""

    processor_milliseconds_per_token: float
    mebibytes: list[float]
    """Resident memory of the process and of its children at the end."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load, as `--json` writes it."""

    options: Mapping[str, Any]
    figures: Figures
    used: Mapping[str, Used]
    """By process; of a coordinator elsewhere, only the clients'."""
    round_waits: Mapping[str, Mapping[str, float]]
    """p50 and p99 in milliseconds of the times that a round waits in the coordinator, by place; empty where its metrics
    are not read."""


def table(report: LoadReport) -> Table:
    """The report as a table of two columns."""
    found = report.figures
    shown = Table("figure", "value")
    rows: list[tuple[str, str]] = [
        ("requests completed / failed", f"{found.completed} / {found.failed}"),
        *((f"failed with {name}", f"{count}: {found.reasons[name]}") for name, count in found.errors.items()),
        ("duration (s)", f"{found.seconds:.1f}"),
        ("tokens of prompts / completions", f"{found.prompt_tokens} / {found.output_tokens}"),
        ("requests per second", f"{found.requests_per_second:.2f}"),
    ]
    if found.goodput is not None:
        bounds = " ".join(report.options["goodput"])
        rows.append((f"goodput, requests per second ({bounds})", f"{found.goodput:.2f}"))
    rows.append(("completion tokens per second", f"{found.output_tokens_per_second:.0f}"))
    for name, spread in found.latencies.items():
        each = ", ".join(f"{percent} {value:.1f}" for percent, value in spread.percentiles.items())
        rows.append((f"{name.upper()} (ms)", f"mean {spread.mean:.1f}, {each}"))
    for name, used in report.used.items():
        sizes = " + ".join(f"{size:.0f}" for size in used.mebibytes)
        rows.append(
            (f"{name}: ms of a core per token; MiB", f"{used.processor_milliseconds_per_token:.3f}; {sizes}")
        )
    for place, words in _PLACES.items():
        if place in report.round_waits:
            each = ", ".join(f"{name} {value:.2f}" for name, value in report.round_waits[place].items())
            rows.append((f"waits (ms): {words}", each))
    for row in rows:
        shown.add_row(*row)
    return shown


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Send a load, print the table, write the file. Ends the process with one sentence when it cannot."""
    options = parse(arguments, program)
    try:
        report = uvloop.run(_measure(options))
    except TandemError as error:
        exit_with(error, exit_code(error))
        return
    except KeyboardInterrupt:
        sys.exit(130)
    Console(highlight=False).print(table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    if not report.figures.completed:
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The server under load."""

    connect: Connect
    """Connects a client to it."""
    pids: Mapping[str, int]
    """Processes that are measured by name; clients: this one."""
    metrics_url: str = ""
    """Empty where no metrics are read."""

    def used(self) -> dict[str, float]:
        """Processor seconds of each process so far. The clients' has started the others, which count by themselves."""
        return {
            name: sum(os.times()[:2]) if name == "clients" else sum(map(_processor_seconds, tree(pid)))
            for name, pid in self.pids.items()
        }

    def waits(self) -> Counts:
        """The waits of rounds so far."""
        if not self.metrics_url:
            return {}
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            return waits_of(response.read().decode())


async def _measure(options: argparse.Namespace) -> LoadReport:
    async with _loaded(options) as server:
        temperature = options.temperature
        if temperature is None:
            temperature = 0.0 if len(server.pids) == 1 or options.rule == "greedy" else 1.0

        async def sent(count: int, rate: float, seed: int) -> list[Served]:
            wanted = arrivals(count, rate, seed, options.prompt_tokens, options.output_tokens)
            is_paced = not math.isinf(rate)
            return await send(server.connect, wanted, options.clients, temperature, is_paced=is_paced)

        # To warm up
        await sent(8, math.inf, options.seed + 1)
        before, waits = server.used(), server.waits()
        served = await sent(options.requests or 4 * options.clients, options.rate, options.seed)
        found = figures(served, options.bounds, options.percentiles)
        used = {
            name: Used(
                1000.0 * (seconds - before[name]) / max(found.output_tokens, 1),
                _resident_mebibytes(server.pids[name])[: 1 if name == "clients" else None],
            )
            for name, seconds in server.used().items()
        }
        return LoadReport(shown(options), found, used, quantiles(waits, server.waits()))


@asynccontextmanager
async def _loaded(options: argparse.Namespace) -> AsyncIterator[Loaded]:
    """The server that the options name, or a coordinator before two scripted services."""
    clients = {"clients": os.getpid()}
    if options.http is not None:
        yield Loaded(await _over_http(options.http, options), clients)
        return
    if options.address:
        credentials = Credentials(token_file=options.token_file)
        yield Loaded(partial(grpc_connection, options.address, credentials), clients)
        return
    async with AsyncExitStack() as stack:
        (target, target_pid), (draft, draft_pid) = [
            await stack.enter_async_context(
                process(
                    f"{__package__}.fakes",
                    *("--role", role, "--step-ms", str(step), "--acceptance", str(options.acceptance)),
                )
            )
            for role, step in (("target", options.verify_ms), ("draft", options.draft_ms))
        ]
        metrics_port, http_port = free_port(), free_port()
        # As many requests as the clients may send; by default 256 of them run.
        most = max(options.clients, options.workers, 256)
        address, pid = await stack.enter_async_context(
            process(
                SERVICES["coordinator"],
                *("--target-address", target, "--draft-address", draft),
                *("--num-speculative-tokens", str(options.num_speculative_tokens)),
                *("--speculation-policy", "fixed", "--draft-ahead", "off"),
                *(() if options.rule == "greedy" else ("--rejection-sampling-strategy", options.rule)),
                *("--workers", str(options.workers), "--stream-interval", str(options.stream_interval)),
                *("--prometheus-port", str(metrics_port), "--max-concurrent-requests", str(most)),
                *(("--http-port", str(http_port)) if options.over == "http" else ()),
                *(("--measure-waits",) if options.measure_waits else ()),
            )
        )
        connect: Connect = partial(grpc_connection, address)
        if options.over == "http":
            connect = await _over_http(f"http://127.0.0.1:{http_port}", options)
        pids = {"coordinator": pid, "target": target_pid, "draft": draft_pid, **clients}
        yield Loaded(connect, pids, f"http://127.0.0.1:{metrics_port}/metrics")


async def _over_http(origin: str, options: argparse.Namespace) -> Connect:
    """Connects clients to an OpenAI-compatible server."""
    token = "" if options.token_file is None else options.token_file.read_text(encoding="utf-8").strip()
    return partial(http_connection, origin, options.model or await served_model(origin, token), token)


async def send(
    connect: Connect, arrivals: Sequence[Arrival], clients: int, temperature: float, *, is_paced: bool
) -> list[Served]:
    """Send all requests, each at its arrival or when a client is free, and read the answers to their ends.

    Args:
        clients: Connections, each with at most one request at once.
        is_paced: Whether a request's latencies begin at its arrival, even if it waits for a free client; else when
            it is sent.
    """
    began = time.perf_counter()
    places: asyncio.Queue[Connection] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        for _ in range(clients):
            places.put_nowait(await stack.enter_async_context(connect()))

        async def serve(number: int, arrival: Arrival) -> Served:
            await asyncio.sleep(max(0.0, began + arrival.seconds - time.perf_counter()))
            connection = await places.get()
            try:
                served = Served(
                    began + arrival.seconds if is_paced else time.perf_counter(), arrival.prompt_tokens
                )
                # Prompts differ in their first token, so that no replica finds one of them in its cache.
                prompt = tuple(_FIRST_ID + (number + place) % _IDS for place in range(arrival.prompt_tokens))
                try:
                    await connection.complete(LoadRequest(prompt, arrival.output_tokens, temperature), served)
                except TandemError as error:
                    served.error, served.reason = type(error).__name__, str(error)
                served.ended = time.perf_counter()
                return served
            finally:
                places.put_nowait(connection)

        return list(await asyncio.gather(*(serve(*each) for each in enumerate(arrivals))))


# ---- what processes take of the machine; zero where there is no /proc


def tree(pid: int) -> list[int]:
    """A process, its children, their children and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found.extend(parents.get(each, ()))
    return found


def _processor_seconds(pid: int) -> float:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _resident_mebibytes(pid: int) -> list[float]:
    """Resident memory of a process and of each of its children, the largest first."""
    page = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return sorted((page * int(fields[21]) for each in tree(pid) if (fields := _fields(each))), reverse=True)


def _fields(pid: int) -> list[str]:
    """Fields of a process's stat after its name (proc(5)); none when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()
