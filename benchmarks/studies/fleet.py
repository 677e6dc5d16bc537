"""Does a fleet serve as many clients as `tandem plan --fleet` computes? `python -m benchmarks.studies.fleet`

Targets and drafts whose steps sleep, a coordinator for each target, and drafts that all of them share. Clients stream
without a pause. Per-client rates are compared with the computed rate of drafts on the targets' devices, which costs
nothing but its steps. With --kills, drafts are killed and started again meanwhile, and every text is compared. With
--fair, a client with one stream is measured beside another with many. Options that are not the study's are the
coordinators'.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import (
    coordinator,
    free_port,
    markdown_head,
    markdown_row,
    model,
    process,
    several,
    study_parser,
)
from benchmarks.load.fakes import Script
from benchmarks.pace import Pace
from coordinator.cli.planning import Fleet, StepTimes, fleet_plan
from tandem.client import Client
from tandem.errors import TandemError
from tandem.model_sources.bundled import demo_pair
from tandem.standard_streams import write_out
from tandem.types import GenerationRequest

_TRIP_SECONDS = 0.001
"""Seconds of a message and its answer that the computation assumes."""
_PROMPT = (300, 301, 302, 303)


@dataclass
class Streams:
    """Arrivals at the clients: tokens, and pauses between them."""

    script: Script
    tokens: list[float]
    """Tokens of each client after the warm-up; in the end those of a second."""
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
    pace = Pace.from_text(options.pace)
    words = ("--acceptance", str(options.acceptance), "--step-ms")
    async with AsyncExitStack() as stack:

        async def scripted(*own: str, port: int = 0) -> tuple[str, int]:
            running = process("benchmarks.load.fakes", *words, *own, port=port)
            return await stack.enter_async_context(running)

        step = str(1e3 * pace.draft_step_seconds)
        drafts = [
            await scripted(step, "--role", "draft", "--stepwise", "--killable", port=free_port())
            for _ in range(options.drafts)
        ]
        coordinators = []
        for number in range(options.targets):
            most = math.ceil(len(range(number, clients, options.targets)) / options.groups)
            bounds = ("--per-8-tokens", str(pace.per_8_rows), "--max-step-sequences", str(most))
            target, _ = await scripted(str(1e3 * pace.verify_seconds), "--role", "target", *bounds)
            running = taking_turns(options, target, ",".join(address for address, _ in drafts))
            coordinators.append(await stack.enter_async_context(running))
        yield coordinators, [pid for _, pid in drafts]


def taking_turns(options: argparse.Namespace, target: str, drafts: str) -> AbstractAsyncContextManager[str]:
    """A coordinator of a target and drafts, whose rounds take turns."""
    words = ("--num-speculative-tokens", str(options.tokens), "--speculation-policy", "fixed")
    return coordinator(target, drafts, *words, "--draft-ahead", "off", "--target-lead", "0", *options.words)


async def load(
    coordinators: Sequence[str],
    clients: int,
    options: argparse.Namespace,
    drafts: Sequence[int] = (),
    kills: int = 0,
) -> Streams:
    """Let so many clients stream, and kill drafts meanwhile."""
    streams = Streams(Script(options.acceptance), [0.0] * clients)
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
    streams.tokens = [count / seconds for count in streams.tokens]
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
    rates = ("tokens/s each, mean", "by the rate together", "slowest client")
    markdown_head("clients", "of the computed", *rates, "wrong or failed")
    for share in options.shares:
        clients = round(plan.clients * share)
        async with fleet(options, clients) as (coordinators, drafts):
            found = await load(coordinators, clients, options)
            mean = statistics.mean(found.tokens)
            figures = (clients / plan.clients, mean, mean / plan.rate, min(found.tokens) / plan.rate)
            bad = f"{found.wrong + len(found.failed)} of {found.texts}"
            markdown_row(clients, *(f"{each:.2f}" for each in figures), bad)
            if options.kills and share == options.shares[-1]:
                disturbed = await load(coordinators, clients, options, drafts, options.kills)
                _show_kills(found, disturbed)


async def fairness(options: argparse.Namespace) -> None:
    """Print the speed of a client with one stream of the demo pair, alone and beside one with many at the same draft.

    The draft has its engine, which shares steps and places; targets and coordinators are each client's own.
    """
    pair = demo_pair()
    async with AsyncExitStack() as stack:

        async def paced(role: str, folder: Path) -> str:
            return await stack.enter_async_context(model(role, folder, "--threads", "1", pace=options.pace))

        draft = await paced("draft", pair.draft)
        targets = [await paced("target", pair.target) for _ in range(2)]
        small, large = [
            await stack.enter_async_context(taking_turns(options, each, draft)) for each in targets
        ]
        markdown_head("streams beside it", "tokens/s", "each of theirs")
        for beside in (0, options.fair, 0):
            own, *others = (await load([small, *[large] * beside], 1 + beside, options)).tokens
            markdown_row(beside, f"{own:.2f}", f"{statistics.mean(others):.2f}" if others else "")


def _show_kills(before: Streams, found: Streams) -> None:
    """Pauses: how much longer than a usual gap a stream waited, for gaps in which a draft was killed."""
    usual = statistics.median(gap for _, gap in before.gaps)
    pauses = [
        max(0.0, gap - usual)
        for at, gap in found.gaps
        if any(at - gap <= moment <= at for moment in found.killed)
    ]
    median, p99, most = 1e3 * np.percentile(pauses or [0.0], (50, 99, 100))
    write_out(
        f"\n{len(found.killed)} kills: {found.texts} texts, {found.wrong} wrong, {len(found.failed)} failed; a usual "
        f"gap {1e3 * usual:.0f} ms; beyond it, of {len(pauses)} gaps with a kill in them: median {median:.0f} ms, "
        f"p99 {p99:.0f} ms, most {most:.0f} ms\n"
    )


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
    add("--fair", type=int, default=0, help="measure instead one stream beside so many of another client")
    add("--kills", type=int, default=0, help="drafts to kill, in a last measurement")
    add("--every", type=float, default=2.0, help="seconds between two kills")
    options, words = parser.parse_known_args()
    options.words = words
    asyncio.run(fairness(options) if options.fair else main(options))
