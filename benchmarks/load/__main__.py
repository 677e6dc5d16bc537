"""`python -m benchmarks.load`: what a coordinator pays for a token, over services without models.

    python -m benchmarks.load --clients 64
    python -m benchmarks.load --clients 1,16,64 --rules residual --tokens 200
    python -m benchmarks.load --clients 64 --rules greedy --workers 1,2
    python -m benchmarks.load --clients 64 --rules greedy --workers 1,2 --worker-cores 0.25  # Linux, as root

The processor time of each process comes from the system, so other work on the machine changes it less than the tokens
per second, which the two scripted services and the clients share.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.load.cluster import (
    RULES,
    Cluster,
    cluster,
    held_to,
    processor_seconds,
    resident_mebibytes,
    tree,
)
from tandem.client import Client

_WARM_UP_CLIENTS = 4
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """Completions that run at once."""

    clients: int
    tokens: int
    """Of each completion."""
    rule: str
    workers: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Result of one load."""

    tokens_per_round: float
    tokens_per_second: float
    milliseconds: Mapping[str, float]
    """Processor time for a token by process: coordinator with its workers, target, draft, clients."""
    mebibytes: float
    """Resident memory of the coordinator, or of its largest worker."""


async def cost(ran: Cluster, load: Load) -> Cost:
    """Run the completions and measure, each over a connection of its own: a worker keeps the connections it gets."""
    rounds = tokens = 0

    async def complete(client: Client, number: int) -> None:
        nonlocal rounds, tokens
        temperature = 0.0 if load.rule == "greedy" else 1.0
        async for chunk in client.generate(
            f"client {number}", max_tokens=load.tokens, temperature=temperature, ignore_eos=True
        ):
            tokens += len(chunk.token_ids)
            if chunk.summary is not None:
                rounds += chunk.summary.speculation.rounds

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(ran.address)) for _ in range(load.clients)]
        await asyncio.gather(*(client.wait_until_ready(_START_SECONDS) for client in clients))
        used, began = _used(ran), time.perf_counter()
        await asyncio.gather(*(complete(client, number) for number, client in enumerate(clients)))
        seconds = time.perf_counter() - began
        milliseconds = {name: 1000.0 * (each - used[name]) / tokens for name, each in _used(ran).items()}
    memory = resident_mebibytes(ran.pids["coordinator"])
    return Cost(tokens / rounds, tokens / seconds, milliseconds, memory[0])


async def measure(options: argparse.Namespace, show: Callable[[Load, list[Cost]], None]) -> None:
    """Measure every rule with every number of workers and clients."""
    for rule, workers in product(options.rules, options.worker_counts):
        options.workers = workers
        async with AsyncExitStack() as stack:
            ran = await stack.enter_async_context(cluster(rule, options))
            await cost(ran, Load(_WARM_UP_CLIENTS, options.tokens, rule, workers))
            if options.worker_cores is not None:
                stack.enter_context(held_to(workers_of(ran.pids["coordinator"]), options.worker_cores))
            for clients in options.clients:
                load = Load(clients, options.tokens, rule, workers)
                show(load, [await cost(ran, load) for _ in range(options.rounds)])


def workers_of(coordinator: int) -> list[int]:
    """The processes that do a coordinator's work: its children, or itself where it has none."""
    first, *others = tree(coordinator)
    return others or [first]


def _used(ran: Cluster) -> dict[str, float]:
    """Processor seconds of each process so far. The clients' has started the others, which count by themselves."""
    return {
        name: sum(os.times()[:2]) if name == "clients" else processor_seconds(pid)
        for name, pid in ran.pids.items()
    }


def main() -> None:
    """Measure what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[64])
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES))
    parser.add_argument(
        "--workers",
        dest="worker_counts",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1],
        help="processes of the coordinator",
    )
    parser.add_argument(
        "--worker-cores",
        type=float,
        help="how much of a core each worker may use: shows on few cores what more workers give on many",
    )
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a streamed chunk")
    parser.add_argument("--tokens", type=int, default=400, help="of each completion")
    parser.add_argument("--rounds", type=int, default=3, help="the table shows medians")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument(
        "--acceptance", type=float, default=0.72, help="share of positions where the draft is right"
    )
    parser.add_argument("--verify-ms", type=float, default=5.0, help="duration of a step of the target")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="duration of a proposal")
    options = parser.parse_args()
    others = ("target", "draft", "clients")
    table = Table(
        *("rule", "clients", "tokens/round", "tokens/s", "coordinator ms/token", "MiB", "workers"),
        *(f"{name} ms/token" for name in others),
    )

    def show(load: Load, costs: list[Cost]) -> None:
        def median(value: Callable[[Cost], float]) -> float:
            return statistics.median(map(value, costs))

        table.add_row(
            load.rule,
            str(load.clients),
            f"{median(lambda each: each.tokens_per_round):.2f}",
            f"{median(lambda each: each.tokens_per_second):.0f}",
            f"{median(lambda each: each.milliseconds['coordinator']):.3f}",
            f"{median(lambda each: each.mebibytes):.0f}",
            str(load.workers),
            *(f"{statistics.median(each.milliseconds[name] for each in costs):.3f}" for name in others),
        )

    uvloop.run(measure(options, show))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
