"""`tandem bench --clients N`: a load on a coordinator or on any OpenAI-compatible server.

    tandem bench --clients 64 --rate 20 --goodput ttft:500 itl:50
    tandem bench --clients 64 --address 127.0.0.1:50051 --json load.json
    tandem bench --clients 64 --http http://127.0.0.1:8000

Without --address and --http a coordinator runs before two scripted services, so that no model is measured. Requests
arrive as a Poisson process and have log-normal lengths; --seed decides both. Options are named as those of `vllm bench
serve`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import uvloop
from pydantic import AfterValidator, BeforeValidator, Field, FilePath, TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks.common import LISTED, Positive, free_port, one_sentence, process, read_options
from benchmarks.load.clients import (
    Connect,
    Connection,
    LoadRequest,
    base_of,
    grpc_connection,
    http_connection,
    served_model,
)
from benchmarks.load.figures import (
    BETWEEN,
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Arrival,
    Counts,
    Figures,
    Lengths,
    Served,
    arrivals,
    bound_of,
    figures,
    quantiles,
    waits_of,
)
from coordinator.cli.serve import SERVICES
from tandem.config.options import Options
from tandem.config.rule import Rule, Rules
from tandem.errors import TandemError
from tandem.rpc.credentials import Credentials

_FIRST_ID, _IDS = 300, 1000
"""Prompts consist of these ids: lower ones are special tokens and single bytes."""
_PLACES = {
    "event_loop": "an answer, to be read",
    "answer": "a round, to go on with its answer",
    BETWEEN: "a round, from acceptance to its question",
    "question": "a question, to be written",
}
"""The places where a round waits in the coordinator, in its order."""


def _checked(text: str) -> str:
    bound_of(text)
    return text


def _lengths(value: Any) -> Any:
    return Lengths.parse(value) if isinstance(value, str) else value


def _one_server(options: LoadSettings) -> Iterator[str]:
    if options.http is not None and options.address:
        yield "--address and --http name two servers; give one of them"
    if options.over == "http" and (options.address or options.http is not None):
        yield "--over http is about a coordinator that is started; a server that runs has --http URL"


class LoadSettings(Options):
    """Options of a load. Those from `rule` on are of the coordinator that is started without --address and --http."""

    own_rules: ClassVar[Rules] = (Rule("server", "A load has one server.", _one_server),)

    clients: Positive = 64
    """Connections, each with one request at once."""
    rate: float = Field(default=math.inf, gt=0)
    """Requests a second; inf: as many as clients take."""
    requests: Positive | None = None
    """By default four for each client."""
    seed: int = 0
    """Decides arrivals and lengths."""
    goodput: tuple[Annotated[str, AfterValidator(_checked)], ...] = ()
    """NAME:MS: bounds of ttft, tpot, itl or e2el."""
    percentiles: Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], *LISTED] = (50.0, 90.0, 99.0)
    """Percentiles of latencies."""
    prompt_tokens: Annotated[Lengths, BeforeValidator(_lengths)] = SHAREGPT_PROMPTS
    """MEDIAN[:SIGMA[:MAXIMUM]]; by default as ShareGPT's chats."""
    output_tokens: Annotated[Lengths, BeforeValidator(_lengths)] = SHAREGPT_OUTPUTS
    """Likewise."""
    temperature: float | None = Field(default=None, ge=0)
    """By default that of the rule, and 0 for a server that runs."""
    json_file: Annotated[Path | None, Field(exclude=True)] = None
    """Write all figures there."""
    address: str = ""
    """HOST:PORT of a coordinator that runs. By default one is started."""
    http: Annotated[str, AfterValidator(base_of)] | None = None
    """URL of an OpenAI-compatible server that runs, such as vLLM's."""
    model: str = ""
    """Model to ask for over HTTP. By default the first that the server lists."""
    token_file: Annotated[FilePath | None, Field(exclude=True)] = None
    """File with the token for it."""
    rule: Literal["greedy", "strict", "residual", "block"] = "greedy"
    """Acceptance rule above temperature 0."""
    over: Literal["grpc", "http"] = "grpc"
    """Protocol of the clients."""
    workers: Positive = 1
    """Processes of the coordinator."""
    measure_waits: bool = False
    """Measure where rounds wait in the coordinator."""
    stream_interval: Positive = 1
    """Tokens of a chunk."""
    num_speculative_tokens: Positive = 4
    """Tokens proposed per verification."""
    acceptance: float = Field(default=0.72, ge=0, le=1)
    """Share of positions where the scripted draft is right."""
    verify_ms: float = Field(default=5.0, ge=0)
    """Duration of a step of the scripted target."""
    draft_ms: float = Field(default=1.0, ge=0)
    """Duration of a scripted proposal."""


@dataclass(frozen=True, slots=True)
class Used:
    """Resources that one process used, its children included."""

    processor_milliseconds_per_token: float
    mebibytes: list[float]
    """Resident memory of the process and of its children at the end."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load, as `--json` writes it."""

    options: LoadSettings
    """Without what names a file of this machine."""
    figures: Figures
    used: Mapping[str, Used]
    """By process; of a coordinator elsewhere, only the clients'."""
    round_waits: Mapping[str, Mapping[str, float]]
    """p50 and p99 in milliseconds of the times that a round waits in the coordinator, by place; empty where its metrics
    are not read."""


def table(report: LoadReport) -> Table:
    """The report as a table of two columns."""

    def described(values: Mapping[str, float], digits: int) -> str:
        return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())

    found = report.figures
    shown = Table("figure", "value")
    add = shown.add_row
    add("requests completed / failed", f"{found.completed} / {found.failed}")
    for name, count in found.errors.items():
        add(f"failed with {name}", f"{count}: {found.reasons[name]}")
    add("duration (s)", f"{found.seconds:.1f}")
    add("tokens of prompts / completions", f"{found.prompt_tokens} / {found.output_tokens}")
    add("requests per second", f"{found.requests_per_second:.2f}")
    if found.goodput is not None:
        bounds = " ".join(report.options.goodput)
        add(f"goodput, requests per second ({bounds})", f"{found.goodput:.2f}")
    add("completion tokens per second", f"{found.output_tokens_per_second:.0f}")
    for name, spread in found.latencies.items():
        add(f"{name.upper()} (ms)", described({"mean": spread.mean, **spread.percentiles}, 1))
    for name, used in report.used.items():
        sizes = " + ".join(f"{size:.0f}" for size in used.mebibytes)
        add(f"{name}: ms of a core per token; MiB", f"{used.processor_milliseconds_per_token:.3f}; {sizes}")
    for place, words in _PLACES.items():
        if place in report.round_waits:
            add(f"waits (ms): {words}", described(report.round_waits[place], 2))
    return shown


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Send a load, print the table, write the file. Ends the process with one sentence when it cannot."""
    with one_sentence():
        options = read_options(LoadSettings, arguments, program, __doc__)
        report = uvloop.run(_measure(options))
    Console(highlight=False).print(table(report))
    if options.json_file is not None:
        options.json_file.write_bytes(TypeAdapter(LoadReport).dump_json(report, indent=2) + b"\n")
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


async def _measure(options: LoadSettings) -> LoadReport:
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
        found = figures(served, dict(map(bound_of, options.goodput)), options.percentiles)
        used = {
            name: Used(
                1000.0 * (seconds - before[name]) / max(found.output_tokens, 1),
                _resident_mebibytes(server.pids[name])[: 1 if name == "clients" else None],
            )
            for name, seconds in server.used().items()
        }
        return LoadReport(options, found, used, quantiles(waits, server.waits()))


@asynccontextmanager
async def _loaded(options: LoadSettings) -> AsyncIterator[Loaded]:
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
            connect = await _over_http(f"http://127.0.0.1:{http_port}/v1", options)
        pids = {"coordinator": pid, "target": target_pid, "draft": draft_pid, **clients}
        yield Loaded(connect, pids, f"http://127.0.0.1:{metrics_port}/metrics")


async def _over_http(base: str, options: LoadSettings) -> Connect:
    """Connects clients to an OpenAI-compatible server."""
    token = "" if options.token_file is None else options.token_file.read_text(encoding="utf-8").strip()
    return partial(http_connection, base, options.model or await served_model(base, token), token)


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
