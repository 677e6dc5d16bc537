"""`python -m benchmarks.studies.telemetry`: tokens per second and processor time with metrics and traces, and without.

Four clusters of the demo pair complete the same prompts in turn. Traces go to a collector that takes everything and
keeps nothing, a process of this module's own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import grpc

from benchmarks.common import CACHE_FOLDER, Contender, chosen, numbers, process, rotated, service
from benchmarks.contenders import ThroughServices
from benchmarks.load.cluster import processor_seconds
from benchmarks.pairs import open_pair
from benchmarks.peers import Workload
from tandem.client import Client

_WAYS = {
    "none": (),
    "metrics": ("--prometheus-port", "0"),
    "all traced": ("--prometheus-port", "0", "--otlp-endpoint", "SINK"),
    "all traced, a span for each round": ("--prometheus-port", "0", "--otlp-endpoint", "SINK"),
}
_OF_THE_COORDINATOR = {"all traced, a span for each round": ("--trace-rounds", "1")}


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown for each batch."""
    pair = open_pair("demo", CACHE_FOLDER, "cpu")
    ways: dict[str, Contender] = {}
    pids: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        sink = f"http://{await stack.enter_async_context(service('benchmarks.studies.telemetry'))}"
        for name, words in _WAYS.items():
            own = [sink if word == "SINK" else word for word in words]
            target, draft = [
                await stack.enter_async_context(
                    service(f"{role}_service", "--model", str(folder), "--threads", "1", *own)
                )
                for role, folder in (("target", pair.target), ("draft", pair.draft))
            ]
            address, pids[name] = await stack.enter_async_context(
                process(
                    "coordinator",
                    *("--target-address", target, "--draft-address", draft),
                    *own,
                    *_OF_THE_COORDINATOR.get(name, ()),
                )
            )
            client = await stack.enter_async_context(Client(address))
            ways[name] = ThroughServices(client, tokens=4, is_seeded=False)
        for batch in options.batch:
            await _measure(options, ways, pids, pair.prompts(), batch)


async def _measure(
    options: argparse.Namespace,
    ways: dict[str, Contender],
    pids: dict[str, int],
    prompts: Sequence[tuple[int, ...]],
    batch: int,
) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, options.rounds):
        workload = Workload(chosen(prompts, batch, number + 1), 0.0, options.max_tokens)
        for name in rotated(list(ways), number):
            used = processor_seconds(pids[name])
            outcome = await ways[name].run(workload)
            used = processor_seconds(pids[name]) - used
            if number >= 0:  # the first warms up
                speeds[name].append(outcome.tokens_per_second)
                milliseconds[name].append(1e3 * used / outcome.token_count)
    lines = [
        f"{batch} at once, {options.max_tokens} tokens each, medians of {options.rounds} rounds in turn:",
        "",
        "| telemetry | tokens/s | by none, median (lowest to highest) | ms of the coordinator's processor per token |",
        "|---|---:|---:|---:|",
    ]
    for name, own in speeds.items():
        ratios = sorted(a / b for a, b in zip(own, speeds["none"], strict=True))
        lines.append(
            f"| {name} | {statistics.median(own):.1f} | {statistics.median(ratios):.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f}) | {statistics.median(milliseconds[name]):.3f} |"
        )
    sys.stdout.write("\n".join([*lines, "", ""]))
    sys.stdout.flush()


def serve(port: int) -> None:
    """Take all traces and metrics until the process is ended."""
    server = grpc.server(ThreadPoolExecutor(2))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        lambda _request, _context: b""
    )
    for name in ("trace.v1.TraceService", "metrics.v1.MetricsService"):
        full = f"opentelemetry.proto.collector.{name}"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full, {"Export": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    sys.stdout.write(f"ready on {address}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=7, help="of each way")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log-level", help=argparse.SUPPRESS)  # as services are started
    arguments = parser.parse_args()
    if arguments.port is not None:
        serve(arguments.port)
    else:
        asyncio.run(main(arguments))
