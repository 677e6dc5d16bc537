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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.load.clients import (
    Connect,
    Connection,
    LoadRequest,
    Origin,
    grpc_connection,
    http_connection,
    origin_of,
    served_model,
)
from benchmarks.load.cluster import RULES, Cluster, cluster, processor_seconds, resident_mebibytes
from benchmarks.load.figures import (
    BETWEEN,
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Arrival,
    Figures,
    Goodput,
    Lengths,
    Served,
    arrivals,
    figures,
    quantiles,
    read_waits,
)
from coordinator.cli.command import exit_code
from tandem.errors import TandemError
from tandem.rpc.credentials import Credentials
from tandem.settings import exit_with

DESCRIPTION = """`tandem bench --clients N`: a load on a coordinator or on any OpenAI-compatible server.

    tandem bench --clients 64 --rate 20 --goodput ttft:500 itl:50
    tandem bench --clients 64 --address 127.0.0.1:50051 --json load.json
    tandem bench --clients 64 --http http://127.0.0.1:8000

Without --address and --http a coordinator runs before two scripted services, so that no model is measured. Requests
arrive as a Poisson process and have log-normal lengths; --seed decides both. Options are named as those of `vllm bench
serve`."""


def parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """Read the command line; wrong options end the process with a sentence."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--clients", type=_positive, default=64, help="connections, each with one request at once")
    add("--rate", type=_rate, default=math.inf, help="requests a second [default: as many as clients take]")
    add("--requests", type=_positive, help="[default: four for each client]")
    add("--seed", type=int, default=0, help="of arrivals and lengths")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds of ttft, tpot, itl or e2el")
    add("--percentiles", type=_percents, default=[50.0, 90.0, 99.0], help="[default: 50,90,99]")
    add("--prompt-tokens", type=_lengths, default=SHAREGPT_PROMPTS, metavar="MEDIAN[:SIGMA[:MAXIMUM]]")
    add("--output-tokens", type=_lengths, default=SHAREGPT_OUTPUTS, metavar="MEDIAN[:SIGMA[:MAXIMUM]]")
    add("--temperature", type=float, help="[default: that of the rule; 0 at an address]")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--address", metavar="HOST:PORT", help="a coordinator that runs [default: start one]")
    add("--http", type=_origin, metavar="URL", help="an OpenAI-compatible server that runs, such as vLLM's")
    add("--model", help="model to ask for over HTTP [default: the first that the server lists]")
    add("--token-file", type=_file, help="file with the token for it")
    _add_own(parser.add_argument_group("of the coordinator that is started without --address and --http"))
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


def _add_own(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rule", choices=RULES, default="greedy", help="acceptance rule above temperature 0")
    add("--over", choices=("grpc", "http"), default="grpc", help="what clients speak [default: grpc]")
    add("--workers", type=_positive, default=1)
    add("--measure-waits", action="store_true", help="measure where rounds wait in the coordinator")
    add("--stream-interval", type=_positive, default=1)
    add("--num-speculative-tokens", type=_positive, default=4)
    add("--acceptance", type=float, default=0.72, help="share of positions where the scripted draft is right")
    add("--verify-ms", type=float, default=5.0, help="duration of a step of the scripted target")
    add("--draft-ms", type=float, default=1.0, help="duration of a scripted proposal")


def shown(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON has them, without what names a file of this machine."""
    found = {
        name: value for name, value in vars(options).items() if name not in ("bounds", "json", "token_file")
    }
    found["http"] = None if options.http is None else str(options.http)
    found["rate"] = None if math.isinf(options.rate) else options.rate
    for name in ("prompt_tokens", "output_tokens"):
        found[name] = asdict(found[name])
    return found


def _positive(text: str) -> int:
    return int(_checked(text, int, lambda value: value >= 1, "must be a whole number of at least 1"))


def _rate(text: str) -> float:
    return _checked(text, float, lambda value: value > 0, "must be a number above 0, or inf")


def _percents(text: str) -> list[float]:
    words = "must be numbers from 0 to 100 with commas between them"
    return [_checked(part, float, lambda value: 0 <= value <= 100, words) for part in text.split(",")]


def _origin(text: str) -> Origin:
    try:
        return origin_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that can be read")
    return Path(text)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(text: str, kind: type, is_right: Callable[[float], bool], words: str) -> float:
    try:
        value = float(kind(text))
    except ValueError:
        value = math.nan
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return value


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


_PLACES = {
    "event_loop": "an answer, to be read",
    "answer": "a round, to go on with its answer",
    BETWEEN: "a round, from acceptance to its question",
    "question": "a question, to be written",
}
"""The places where a round waits in the coordinator, in its order."""


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


_FIRST_ID, _IDS = 300, 1000
"""Lower ids are special tokens and single bytes."""


async def send(
    connect: Connect,
    arrivals: Sequence[Arrival],
    clients: int,
    temperature: float,
    *,
    is_paced: bool,
) -> list[Served]:
    """Send all requests, each at its arrival or when a client is free, and read the answers to their ends.

    Args:
        connect: Makes a client's connection.
        arrivals: What to send.
        clients: Connections, each with at most one request at once.
        temperature: Of every request.
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
                arrived = began + arrival.seconds if is_paced else time.perf_counter()
                return await _complete(connection, number, arrival, arrived, temperature)
            finally:
                places.put_nowait(connection)

        return list(await asyncio.gather(*(serve(*each) for each in enumerate(arrivals))))


async def _complete(
    connection: Connection, number: int, arrival: Arrival, arrived: float, temperature: float
) -> Served:
    served = Served(arrived, arrival.prompt_tokens)
    # Prompts differ in their first token, so that no replica finds one of them in its cache.
    prompt = tuple(_FIRST_ID + (number + place) % _IDS for place in range(arrival.prompt_tokens))
    try:
        await connection.complete(LoadRequest(prompt, arrival.output_tokens, temperature), served)
    except TandemError as error:
        served.error, served.reason = type(error).__name__, str(error)
    served.ended = time.perf_counter()
    return served


_WARM_UP = 8
"""Requests before those that are measured."""


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


async def _measure(options: argparse.Namespace) -> LoadReport:
    async with _loaded(options) as (connect, ran):
        temperature = options.temperature
        if temperature is None:
            temperature = 0.0 if ran is None or options.rule == "greedy" else 1.0

        async def sent(count: int, rate: float, seed: int) -> list[Served]:
            wanted = arrivals(count, rate, seed, options.prompt_tokens, options.output_tokens)
            return await send(connect, wanted, options.clients, temperature, is_paced=not math.isinf(rate))

        await sent(_WARM_UP, math.inf, options.seed + 1)
        pids = {"clients": os.getpid()} if ran is None else ran.pids
        before = {name: _processor_seconds(name, pid) for name, pid in pids.items()}
        waits = {} if ran is None else read_waits(ran.metrics_url)
        served = await sent(options.requests or 4 * options.clients, options.rate, options.seed)
        found = figures(served, options.bounds, options.percentiles)
        tokens = max(found.output_tokens, 1)
        used = {
            name: Used(
                1000.0 * (_processor_seconds(name, pid) - before[name]) / tokens,
                resident_mebibytes(pid)[: 1 if name == "clients" else None],
            )
            for name, pid in pids.items()
        }
        round_waits = {} if ran is None else quantiles(waits, read_waits(ran.metrics_url))
        return LoadReport(shown(options), found, used, round_waits)


@asynccontextmanager
async def _loaded(options: argparse.Namespace) -> AsyncIterator[tuple[Connect, Cluster | None]]:
    """The connections of clients to the server under load, and the processes that were started for it."""
    if options.http is not None:
        yield await _over_http(options.http, options), None
        return
    if options.address:
        yield partial(grpc_connection, options.address, Credentials(token_file=options.token_file)), None
        return
    is_http = options.over == "http"
    # As many requests as the clients may send; by default 256 of them run.
    more = ["--max-concurrent-requests", str(max(options.clients, options.workers, 256))]
    if options.measure_waits:
        more.append("--measure-waits")
    async with AsyncExitStack() as stack:
        ran = await stack.enter_async_context(
            cluster(options.rule, options, has_metrics=True, has_http=is_http, more=more)
        )
        if is_http:
            yield await _over_http(origin_of(ran.http_url), options), ran
        else:
            yield partial(grpc_connection, ran.address), ran


async def _over_http(origin: Origin, options: argparse.Namespace) -> Connect:
    """Connections of clients to an OpenAI-compatible server.

    Raises:
        TandemError: it cannot be reached, or does not say what model it serves.
    """
    token = "" if options.token_file is None else options.token_file.read_text(encoding="utf-8").strip()
    return partial(http_connection, origin, options.model or await served_model(origin, token), token)


def _processor_seconds(name: str, pid: int) -> float:
    """The clients' process has started the others, which are counted by themselves."""
    return sum(os.times()[:2]) if name == "clients" else processor_seconds(pid)
