"""`python -m benchmarks.studies.fleet`: does a fleet serve as many clients as `tandem plan --fleet` computes?

Targets and drafts whose steps sleep, a coordinator for each target, and drafts that all of them share. Clients stream
without a pause. Per-client rates are compared with the computed rate of drafts on the targets' devices, which costs
nothing but its steps. With --kills, drafts are killed and started again meanwhile, and every text is compared. With
--fair, a client with one stream is measured beside another with many.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.common import floats, free_port, process, service
from benchmarks.load.fakes import Script
from benchmarks.pace import Pace
from coordinator.cli.planning import Fleet, StepTimes, fleet_plan
from tandem.client import Client
from tandem.errors import TandemError
from tandem.model_sources.bundled import demo_pair
from tandem.types import GenerationRequest

_PROMPT = (300, 301, 302, 303)
_COORDINATOR = "coordinator"


@dataclass
class Streams:
    """Arrivals at the clients: tokens, and pauses between them."""

    script: Script
    tokens: list[int] = field(default_factory=list)
    """Tokens of each client after the warm-up."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When a chunk came, and seconds since the one before it."""
    texts: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    """When drafts were killed."""

    async def run(self, client: Client, index: int, begin: float, end: float, max_tokens: int) -> None:
        """Stream one text after the other until the end."""
        while time.monotonic() < end:
            ids: list[int] = []
            times: list[float] = []
            request = GenerationRequest(_PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            try:
                async for chunk in client.generate(request):
                    now = time.monotonic()
                    ids += chunk.token_ids
                    times.append(now)
                    if begin <= now < end:
                        self.tokens[index] += len(chunk.token_ids)
                    if now >= end:
                        break
            except TandemError as error:
                self.failed.append(str(error))
            self.texts += 1
            expected = [self.script.target_token(len(_PROMPT) + number) for number in range(len(ids))]
            self.wrong += ids != expected
            self.gaps += [(after, after - before) for before, after in pairwise(times)]


async def kill(drafts: Sequence[int], count: int, every: float) -> list[float]:
    """Kill one draft after the other, by the processes that keep them; when each was killed."""
    killed = []
    for number in range(count):
        await asyncio.sleep(every)
        os.kill(drafts[number % len(drafts)], signal.SIGUSR1)
        killed.append(time.monotonic())
    return killed


@asynccontextmanager
async def fleet(options: argparse.Namespace, clients: int) -> AsyncIterator[tuple[list[str], list[int]]]:
    """Run targets, drafts and coordinators; the coordinators' addresses, and the processes that keep the drafts.

    A step of a target takes at most its share of a group of its clients. Otherwise they would all come back at once,
    and the target would wait while they draft.
    """
    pace: Pace = options.pace
    common = ("--acceptance", str(options.acceptance))
    async with AsyncExitStack() as stack:
        drafts = [
            await stack.enter_async_context(
                process(
                    "benchmarks.load.fakes",
                    *("--role", "draft", "--step-ms", str(1e3 * pace.draft_step_seconds), "--stepwise"),
                    *("--killable", *common),
                    port=free_port(),
                )
            )
            for _ in range(options.drafts)
        ]
        coordinators = []
        for number in range(options.targets):
            own = len(range(number, clients, options.targets))
            most = math.ceil(own / options.groups)
            target, _ = await stack.enter_async_context(
                process(
                    "benchmarks.load.fakes",
                    *("--role", "target", "--step-ms", str(1e3 * pace.verify_seconds)),
                    *("--per-8-tokens", str(pace.per_8_rows), "--max-step-sequences", str(most), *common),
                )
            )
            running = coordinator(options, target, ",".join(address for address, _ in drafts))
            coordinators.append(await stack.enter_async_context(running))
        yield coordinators, [pid for _, pid in drafts]


def coordinator(options: argparse.Namespace, target: str, drafts: str) -> AbstractAsyncContextManager[str]:
    """A coordinator of a target and drafts, whose rounds take turns."""
    return service(
        _COORDINATOR,
        *("--target-address", target, "--draft-address", drafts),
        *("--num-speculative-tokens", str(options.tokens), "--speculation-policy", "fixed"),
        *("--draft-ahead", "off", "--target-lead", "0", *options.words),
    )


async def load(
    coordinators: Sequence[str],
    clients: int,
    options: argparse.Namespace,
    drafts: Sequence[int] = (),
    kills: int = 0,
) -> Streams:
    """Let so many clients stream, and kill drafts meanwhile."""
    streams = Streams(Script(options.acceptance), [0] * clients)
    begin = time.monotonic() + options.warm_up
    seconds = max(options.seconds, (kills + 1) * options.every)
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Client(address)) for address in coordinators]
        killing = asyncio.create_task(kill(drafts, kills, options.every))
        await asyncio.gather(
            *(
                streams.run(opened[index % len(opened)], index, begin, begin + seconds, options.max_tokens)
                for index in range(clients)
            )
        )
        streams.killed = await killing
    streams.tokens = [round(count / seconds * 1000) for count in streams.tokens]
    return streams


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pace: Pace = options.pace
    times = StepTimes(
        pace.verify_seconds,
        pace.draft_step_seconds,
        (options.acceptance,),
        options.trip_ms / 1e3,
        pace.per_8_rows,
    )
    plan = fleet_plan(Fleet(times, options.targets, options.drafts, options.tokens), options.clients)
    write = sys.stdout.write
    write(
        f"{options.targets} targets, {options.drafts} drafts, K {options.tokens}; together {options.clients} clients "
        f"at {plan.rate:.2f} tokens/s; computed elsewhere: {plan.clients} (law {plan.law:.2f}x), load "
        f"{os.getloadavg()[0]:.1f}\n\n| clients | of the computed | tokens/s each, mean | by the rate together | "
        "slowest client | wrong or failed |\n|---|---|---|---|---|---|\n"
    )
    for share in options.shares:
        clients = round(plan.clients * share)
        async with fleet(options, clients) as (coordinators, drafts):
            found = await load(coordinators, clients, options)
            rates = [count / 1000 for count in found.tokens]
            mean = statistics.mean(rates)
            write(
                f"| {clients} | {clients / plan.clients:.2f} | {mean:.2f} | {mean / plan.rate:.2f} | "
                f"{min(rates) / plan.rate:.2f} | {found.wrong + len(found.failed)} of {found.texts} |\n"
            )
            sys.stdout.flush()
            if options.kills and share == options.shares[-1]:
                disturbed = await load(coordinators, clients, options, drafts, options.kills)
                _show_kills(found, disturbed)


async def fairness(options: argparse.Namespace) -> None:
    """Print the speed of a client with one stream of the demo pair, alone and beside one with many at the same draft.

    The draft has its engine, which shares steps and places; targets and coordinators are each client's own.
    """
    pair = demo_pair()
    async with AsyncExitStack() as stack:

        async def model(role: str) -> str:
            folder = pair.target if role == "target" else pair.draft
            words = ("--role", role, "--pace", options.pace_text, "--model", str(folder), "--threads", "1")
            return await stack.enter_async_context(service("benchmarks.pace", *words))

        draft = await model("draft")
        small, large = [
            await stack.enter_async_context(coordinator(options, await model("target"), draft))
            for _ in range(2)
        ]
        sys.stdout.write("| streams beside it | tokens/s | each of theirs |\n|---|---|---|\n")
        for beside in (0, options.fair, 0):
            found = await load([small, *[large] * beside], 1 + beside, options)
            own, *others = [count / 1000 for count in found.tokens]
            theirs = f"{statistics.mean(others):.2f}" if others else ""
            sys.stdout.write(f"| {beside} | {own:.2f} | {theirs} |\n")
            sys.stdout.flush()


def _show_kills(before: Streams, found: Streams) -> None:
    """Pauses: how much longer than a usual gap a stream waited, for gaps in which a draft was killed."""
    usual = statistics.median(gap for _, gap in before.gaps)
    pauses = sorted(
        max(0.0, gap - usual)
        for at, gap in found.gaps
        if any(at - gap <= moment <= at for moment in found.killed)
    )
    p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))] if pauses else 0.0
    median, most = statistics.median(pauses or [0.0]), max(pauses, default=0.0)
    sys.stdout.write(
        f"\n{len(found.killed)} kills: {found.texts} texts, {found.wrong} wrong, {len(found.failed)} failed; a usual "
        f"gap {1e3 * usual:.0f} ms; beyond it, of {len(pauses)} gaps with a kill in them: median "
        f"{1e3 * median:.0f} ms, p99 {1e3 * p99:.0f} ms, most {1e3 * most:.0f} ms\n"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for, those of the coordinators under `words`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.fleet", description=__doc__)
    add = parser.add_argument
    add("--pace", dest="pace_text", default="3.25,12,8", help="VERIFY_MS,DRAFT_STEP_MS,PER_8_ROWS")
    add("--targets", type=int, default=4)
    add("--drafts", type=int, default=2)
    add("--clients", type=int, default=16, help="with drafts on the targets' devices")
    add("--tokens", type=int, default=4, help="K")
    add("--acceptance", type=float, default=0.8)
    add("--groups", type=int, default=4, help="in which a target's clients take turns; 1: no step is bounded")
    add("--trip-ms", type=float, default=1.0, help="a message and its answer, for the computation")
    add("--shares", type=floats, default=[1.0, 0.9], help="of the computed number of clients")
    add("--seconds", type=float, default=20.0, help="of each measurement")
    add("--warm-up", type=float, default=4.0, help="seconds that do not count")
    add("--max-tokens", type=int, default=400, help="of each text")
    add("--fair", type=int, default=0, help="measure instead one stream beside so many of another client")
    add("--kills", type=int, default=0, help="drafts to kill, in a last measurement")
    add("--every", type=float, default=2.0, help="seconds between two kills")
    options, words = parser.parse_known_args(arguments)
    options.words = words
    options.pace = Pace.from_text(options.pace_text)
    return options


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    asyncio.run(fairness(chosen) if chosen.fair else main(chosen))
