"""Does a fleet serve as many clients as `tandem plan --fleet` computes? `python -m benchmarks.studies.fleet`

Targets and drafts whose steps sleep, a coordinator for each target, and drafts that all of them share. Clients stream
without a pause. Per-client rates are compared with the computed rate of drafts on the targets' devices, which costs
nothing but its steps, and every text is compared. Options that are not the study's are the coordinators'.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.common import markdown_head, markdown_row, service, several, study_parser
from benchmarks.load.fakes import Script
from benchmarks.pace import Pace
from coordinator.cli.planning import Fleet, StepTimes, fleet_plan
from tandem.client import Client
from tandem.errors import TandemError
from tandem.standard_streams import write_out
from tandem.types import GenerationRequest

_TRIP_SECONDS = 0.001
"""Seconds of a message and its answer that the computation assumes."""
_PROMPT = (300, 301, 302, 303)


@dataclass
class Streams:
    """Arrivals at the clients."""

    script: Script
    tokens: list[float]
    """Tokens of each client after the warm-up."""
    texts: int = 0
    bad: int = 0
    """Texts that are wrong, and requests that failed."""

    async def run(self, client: Client, index: int, begin: float, end: float, max_tokens: int) -> None:
        """Stream one text after the other until the end."""
        while time.monotonic() < end:
            ids: list[int] = []
            is_bad = False
            request = GenerationRequest(_PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            try:
                async for chunk in client.generate(request):
                    now = time.monotonic()
                    ids += chunk.token_ids
                    if begin <= now < end:
                        self.tokens[index] += len(chunk.token_ids)
                    if now >= end:
                        break
            except TandemError:
                is_bad = True
            expected = [self.script.target_token(len(_PROMPT) + number) for number in range(len(ids))]
            self.texts += 1
            self.bad += is_bad or ids != expected


@asynccontextmanager
async def fleet(options: argparse.Namespace, clients: int) -> AsyncIterator[list[str]]:
    """Run targets, drafts and coordinators; the coordinators' addresses.

    A step of a target takes at most its share of a group of its clients. Otherwise they would all come back at once,
    and the target would wait while they draft. The rounds of a coordinator take turns.
    """
    pace = Pace.from_text(options.pace)
    async with AsyncExitStack() as stack:

        async def scripted(role: str, seconds: float, *words: str) -> str:
            step = ("--step-ms", str(1e3 * seconds), "--acceptance", str(options.acceptance))
            running = service("benchmarks.load.fakes", "--role", role, *step, *words)
            return await stack.enter_async_context(running)

        drafts = [
            await scripted("draft", pace.draft_step_seconds, "--stepwise") for _ in range(options.drafts)
        ]
        words = ("--draft-address", ",".join(drafts), "--num-speculative-tokens", str(options.tokens))
        words += (
            "--speculation-policy",
            "fixed",
            "--draft-ahead",
            "off",
            "--target-lead",
            "0",
            *options.words,
        )
        coordinators = []
        for number in range(options.targets):
            most = math.ceil(len(range(number, clients, options.targets)) / options.groups)
            bounds = ("--per-8-tokens", str(pace.per_8_rows), "--max-step-sequences", str(most))
            target = await scripted("target", pace.verify_seconds, *bounds)
            running = service("coordinator", "--target-address", target, *words)
            coordinators.append(await stack.enter_async_context(running))
        yield coordinators


async def load(coordinators: Sequence[str], clients: int, options: argparse.Namespace) -> Streams:
    """Let so many clients stream."""
    streams = Streams(Script(options.acceptance), [0.0] * clients)
    begin = time.monotonic() + options.warm_up
    part = begin, begin + options.seconds, options.max_tokens
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Client(address)) for address in coordinators]
        await asyncio.gather(
            *(streams.run(opened[index % len(opened)], index, *part) for index in range(clients))
        )
    return streams


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pace = Pace.from_text(options.pace)
    steps = pace.verify_seconds, pace.draft_step_seconds
    times = StepTimes(*steps, (options.acceptance,), _TRIP_SECONDS, pace.per_8_rows)
    plan = fleet_plan(Fleet(times, options.targets, options.drafts, options.tokens), options.clients)
    write_out(
        f"{options.targets} targets, {options.drafts} drafts, K {options.tokens}; together {options.clients} clients "
        f"at {plan.rate:.2f} tokens/s; computed elsewhere: {plan.clients} (law {plan.law:.2f}x), load "
        f"{os.getloadavg()[0]:.1f}\n\n"
    )
    columns = ("tokens/s each, mean", "by the rate together", "slowest client")
    markdown_head("clients", "of the computed", *columns, "wrong or failed")
    for share in options.shares:
        clients = round(plan.clients * share)
        async with fleet(options, clients) as coordinators:
            found = await load(coordinators, clients, options)
        rates = [tokens / options.seconds for tokens in found.tokens]
        mean = statistics.mean(rates)
        figures = (clients / plan.clients, mean, mean / plan.rate, min(rates) / plan.rate)
        markdown_row(clients, *(f"{each:.2f}" for each in figures), f"{found.bad} of {found.texts}")


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pace", default="3.25,12,8", help="VERIFY_MS,DRAFT_STEP_MS,PER_8_ROWS")
    add("--targets", type=int, default=4)
    add("--drafts", type=int, default=2)
    add("--clients", type=int, default=16, help="with drafts on the targets' devices")
    add("--tokens", type=int, default=4, help="K")
    add("--acceptance", type=float, default=0.8)
    add("--groups", type=int, default=4, help="in which a target's clients take turns; 1: no step is bounded")
    add("--shares", type=several(float), default=[1.0, 0.9], help="of the computed number of clients")
    add("--seconds", type=float, default=20.0, help="of each measurement")
    add("--warm-up", type=float, default=4.0, help="seconds that do not count")
    add("--max-tokens", type=int, default=400, help="of each text")
    options, words = parser.parse_known_args()
    options.words = words
    asyncio.run(main(options))
