"""Adaptive speculation against the target alone and against every fixed K, in turn, through the services.

    python -m benchmarks.studies.speculation
    python -m benchmarks.studies.speculation first --pairs demo --pace 40,6,0.1
    python -m benchmarks.studies.speculation controller

`cells` compares completions, `first` the first tokens of a request after many others, and `controller` is the time that
the controller itself takes a round. Requests have no seed: with one, the length would not follow the load.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compared_services import Setup, services
from benchmarks.models.pairs import DEMO, Pair, open_pair
from benchmarks.order import chosen, rotated
from benchmarks.services import service
from benchmarks.settings import BenchSettings
from coordinator.speculation.controller import SpeculationController
from coordinator.speculation.kinds import request_kind
from coordinator.stats.rounds import RoundCost, RoundResult, RoundTimes
from tandem.admin import Stats
from tandem.admin_client import AdminClient
from tandem.client import Client
from tandem.types import GenerationRequest

RANDOM = "random"
"""The demo target with a draft of the demo draft's shape and random weights."""
PAIRS = ("demo", "shaped:50M:1:0.8", RANDOM)
WARM_UP_ROUNDS = 2
FIRST_TOKENS = 32
OTHERS = 50
"""Requests before the one whose first tokens are timed."""
NEEDED = 0.97
"""Tokens per second, by those of the target alone."""
NEEDED_OF_FIXED = 0.95
"""The same by those of the best fixed K, where drafting pays."""
CONTROLLER_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding."""

    name: str
    address: str
    client: Client
    tokens: int | None = None
    """K; None for the coordinator's."""
    speculation: bool = True

    async def seconds(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, temperature: float) -> float:
        """Seconds to complete all prompts at once."""
        began = time.perf_counter()
        await asyncio.gather(*(self._complete(prompt, max_tokens, temperature) for prompt in prompts))
        return time.perf_counter() - began

    async def _complete(self, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
        request = GenerationRequest(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            num_speculative_tokens=self.tokens,
            speculation=self.speculation,
            ignore_eos=True,
        )
        async for _ in self.client.generate(request):
            pass


def random_draft(folder: Path) -> Path:
    """A draft of the demo draft's shape and random weights, in this folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    models: Any = AutoModelForCausalLM
    models.from_config(AutoConfig.from_pretrained(DEMO / "draft")).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "draft" / name, folder / name)
    return folder


@asynccontextmanager
async def started(
    name: str, arguments: argparse.Namespace, longest: int
) -> AsyncIterator[tuple[Pair, list[Way]]]:
    """A pair's services, with a coordinator for each policy."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-speculation-")))
        text = f"{DEMO / 'target'}:{random_draft(folder)}" if name == RANDOM else name
        pair = open_pair(text, BenchSettings().cache_folder, "cpu")
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            dtype="bfloat16",
            threads=arguments.threads,
            device="cpu",
            max_length=max(map(len, pair.prompts())) + longest,
            max_sequences=max(arguments.batch),
            num_speculative_tokens=arguments.most,
            logs=folder,
            pace=arguments.pace,
            delay_ms=arguments.delay,
        )
        addresses = await stack.enter_async_context(services(setup, prefix_caching=False))
        fixed = await stack.enter_async_context(
            service(
                "coordinator",
                *("--target-address", addresses.target, "--draft-address", addresses.draft),
                *("--speculation-policy", "fixed"),
            )
        )
        adaptive = await stack.enter_async_context(Client(addresses.coordinator))
        ways = [
            Way("alone", addresses.coordinator, adaptive, speculation=False),
            Way("adaptive", addresses.coordinator, adaptive),
        ]
        if arguments.fixed:
            other = await stack.enter_async_context(Client(fixed))
            ways += [Way(f"K={count}", fixed, other, count) for count in arguments.fixed]
        yield pair, ways


async def cells(console: Console, arguments: argparse.Namespace) -> None:
    """Completions in turn, and the medians of the ratios within a round."""
    for name in arguments.pairs:
        table = Table("T", "batch", "tokens", "by alone", "by best fixed", "each by alone", title=name)
        async with started(name, arguments, max(arguments.max_tokens)) as (pair, ways):
            prompts = pair.prompts()
            for temperature in arguments.temperature:
                for batch in arguments.batch:
                    for tokens in arguments.max_tokens:
                        times: dict[str, list[float]] = {way.name: [] for way in ways}
                        for number in range(-WARM_UP_ROUNDS, arguments.rounds):
                            some = chosen(prompts, batch, number + WARM_UP_ROUNDS)
                            for way in rotated(ways, number):
                                seconds = await way.seconds(some, tokens, temperature)
                                if number >= 0:
                                    times[way.name].append(seconds)
                        table.add_row(f"{temperature:g}", str(batch), str(tokens), *_judged(times))
            decisions = (await stats(ways)).decisions
        console.print(table)
        for decision in decisions:
            console.print(f"{decision.rule}, temperature {decision.temperatures}, {decision.reason}")


async def stats(ways: Sequence[Way]) -> Stats:
    """Figures of the coordinator of the adaptive way."""
    async with AdminClient(next(way for way in ways if way.name == "adaptive").address) as admin:
        return await admin.stats()


def _judged(times: dict[str, list[float]]) -> tuple[str, str, str]:
    """Adaptive by the target alone, by the best fixed K where that pays, and each way by the target alone."""
    rates = {
        name: statistics.median(alone / own for alone, own in zip(times["alone"], seconds, strict=True))
        for name, seconds in times.items()
    }
    adaptive = rates["adaptive"]
    fixed = {name: rate for name, rate in rates.items() if name.startswith("K=")}
    of_best = ""
    if fixed and max(fixed.values()) > 1.0:
        best = max(fixed, key=fixed.__getitem__)
        share = statistics.median(
            best_seconds / own for best_seconds, own in zip(times[best], times["adaptive"], strict=True)
        )
        of_best = f"{share:.2f} ({best}){'' if share >= NEEDED_OF_FIXED else ' !'}"
    mark = "" if adaptive >= NEEDED else " !"
    return f"{adaptive:.2f}{mark}", of_best, ", ".join(f"{name} {rate:.2f}" for name, rate in fixed.items())


async def first(console: Console, arguments: argparse.Namespace) -> None:
    """The first tokens of a request after many others, by those of the target alone."""
    table = Table("pair", "T", f"first {FIRST_TOKENS} tokens after {OTHERS} requests, by alone")
    arguments.fixed = ()
    for name in arguments.pairs:
        for temperature in arguments.temperature:
            # A coordinator that knows nothing yet, for each temperature.
            async with started(name, arguments, FIRST_TOKENS) as (pair, (alone, adaptive)):
                prompts = pair.prompts()
                for number in range(OTHERS):
                    await adaptive.seconds(chosen(prompts, 1, number), FIRST_TOKENS, temperature)
                ratios = []
                for number in range(2 * arguments.rounds):
                    some = chosen(prompts, 1, number)
                    times = {
                        way.name: await way.seconds(some, FIRST_TOKENS, temperature)
                        for way in rotated([alone, adaptive], number)
                    }
                    ratios.append(times["alone"] / times["adaptive"])
            share = statistics.median(ratios)
            table.add_row(name, f"{temperature:g}", f"{share:.2f}{'' if share >= NEEDED else ' !'}")
    console.print(table)


def controller(console: Console) -> None:
    """Microseconds of `begin_round` and `end_round`, and the processor's time of both on average."""
    table = Table("requests at once", "median us", "mean us of the processor")
    for load in (1, 4, 16, 64):
        wall, mean = _controller_times(load)
        table.add_row(str(load), f"{wall:.1f}", f"{mean:.1f}")
    console.print(table)


def _controller_times(load: int) -> tuple[float, float]:
    shared, kind, random = SpeculationController(), request_kind("draft", "residual", 1.0), Random(1)
    requests = [shared.request(kind, 4) for _ in range(load)]
    for request in requests:
        request.target = "target"
    seconds, used = [], 0.0
    for _ in range(CONTROLLER_ROUNDS // load):
        for request in requests:
            noise, accepted = random.lognormvariate(0.0, 0.1), random.randrange(5)
            used -= time.thread_time()
            began = time.perf_counter()
            proposed = request.begin_round(load)
            begun = time.perf_counter() - began
            used += time.thread_time()
            result = _round_result(proposed, min(accepted, proposed), noise, load)
            used -= time.thread_time()
            began = time.perf_counter()
            request.end_round(result)
            seconds.append(begun + time.perf_counter() - began)
            used += time.thread_time()
    return statistics.median(seconds) * 1e6, used / len(seconds) * 1e6


def _round_result(proposed: int, accepted: int, noise: float, load: int) -> RoundResult:
    verify, draft = 0.0065 * noise, 0.0012 * proposed * noise
    cost = RoundCost(proposed, verify + draft + 0.0005, verify, load, load * (proposed + 1), draft, load)
    return RoundResult(
        proposed,
        accepted,
        accepted + 1,
        RoundTimes(0.0, 0.0, draft, draft + verify, draft + verify),
        cost,
        proposed > 0,
        None,
        "target",
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def rates(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    def fixed(text: str) -> list[int]:
        return [] if text == "none" else numbers(text)

    parser.add_argument("what", nargs="?", choices=["cells", "first", "controller"], default="cells")
    parser.add_argument("--pairs", type=lambda text: text.split(","), default=list(PAIRS))
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16])
    parser.add_argument("--temperature", type=rates, default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=numbers, default=[64, 256])
    parser.add_argument("--fixed", type=fixed, default=[1, 2, 4, 6], help="lengths to compare with, or none")
    parser.add_argument("--most", type=int, default=6, help="longest proposal of the adaptive policy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each model")
    parser.add_argument("--pace", default="", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS], as in tandem bench")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds to each service, one way")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if arguments.what == "controller":
        controller(console)
    else:
        asyncio.run((cells if arguments.what == "cells" else first)(console, arguments))


if __name__ == "__main__":
    main()
