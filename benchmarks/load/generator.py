"""`tandem bench --clients N`: sends a load and reports what came back. See `options`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial

import uvloop
from rich.console import Console

from benchmarks.load.arrivals import arrivals
from benchmarks.load.clients.connection import Connect
from benchmarks.load.clients.http_exchange import Origin
from benchmarks.load.clients.over_grpc import grpc_connection
from benchmarks.load.clients.over_http import http_connection, origin_of, served_model
from benchmarks.load.cluster import Cluster, cluster
from benchmarks.load.coordinator_waits import quantiles, read_waits
from benchmarks.load.figures import Served, figures
from benchmarks.load.options import parse, shown
from benchmarks.load.processes import processor_seconds, resident_mebibytes
from benchmarks.load.report import LoadReport, Used, table
from benchmarks.load.sending import send
from coordinator.cli.command import exit_code
from tandem.errors import TandemError
from tandem.rpc.credentials import Credentials
from tandem.settings import exit_with

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
