"""Adaptive speculation against the target alone and against every fixed K, in turn, through the services.

    python -m benchmarks.studies.speculation
    python -m benchmarks.studies.speculation first --pairs demo --pace 40,6,0.1

`cells` compares completions, `first` the first tokens of a request after many others. Requests have no seed:
with one, the length would not follow the load.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import CACHE_FOLDER, Contender, floats, in_turn, names, numbers, speed_ratio
from benchmarks.contenders import Setup, ThroughServices, coordinator_of, services
from benchmarks.pairs import DEMO, Pair, open_pair
from benchmarks.peers import Outcome
from tandem.admin_client import AdminClient
from tandem.client import Client

RANDOM = "random"
"""The demo target with a draft of the demo draft's shape and random weights."""
PAIRS = ("demo", "shaped:50M:1:0.8", RANDOM)
FIRST_TOKENS = 32
OTHERS = 50
"""Requests before the one whose first tokens are timed."""
NEEDED = 0.97
"""Tokens per second, by those of the target alone; less is marked. The goal of docs/benchmarks.md."""
NEEDED_OF_FIXED = 0.95
"""The same by those of the best fixed K, where drafting pays."""


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
    name: str, options: argparse.Namespace, longest: int
) -> AsyncIterator[tuple[Pair, dict[str, Contender], str]]:
    """A pair's services, with a coordinator for each policy; the ways, and the address of the adaptive one."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-speculation-")))
        text = f"{DEMO / 'target'}:{random_draft(folder)}" if name == RANDOM else name
        pair = open_pair(text, CACHE_FOLDER, "cpu")
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            threads=options.threads,
            max_length=max(map(len, pair.prompts())) + longest,
            max_sequences=max(options.batch),
            num_speculative_tokens=options.most,
            logs=folder,
            pace=options.pace,
            delay_ms=options.delay,
        )
        addresses = await stack.enter_async_context(services(setup))
        adaptive = await stack.enter_async_context(Client(addresses.coordinator))
        ways: dict[str, Contender] = {
            "alone": ThroughServices(adaptive, speculation=False, is_seeded=False),
            "adaptive": ThroughServices(adaptive, is_seeded=False),
        }
        if options.fixed:
            policy = ("--speculation-policy", "fixed")
            other = await stack.enter_async_context(
                coordinator_of(setup, addresses.target, addresses.draft, *policy)
            )
            client = await stack.enter_async_context(Client(other))
            ways |= {
                f"K={count}": ThroughServices(client, tokens=count, is_seeded=False)
                for count in options.fixed
            }
        yield pair, ways, addresses.coordinator


async def cells(console: Console, options: argparse.Namespace) -> None:
    """Completions in turn, and the medians of the ratios within a round."""
    for name in options.pairs:
        table = Table("T", "batch", "tokens", "by alone", "by best fixed", "each by alone", title=name)
        async with started(name, options, max(options.max_tokens)) as (pair, ways, address):
            for heat, batch, tokens in product(options.temperature, options.batch, options.max_tokens):
                found = await in_turn(ways, pair.prompts(), batch, heat, tokens, options.rounds, warm_up=2)
                table.add_row(f"{heat:g}", str(batch), str(tokens), *_judged(found))
            async with AdminClient(address) as admin:
                decisions = (await admin.stats()).decisions
        console.print(table)
        for decision in decisions:
            console.print(f"{decision.rule}, temperature {decision.temperatures}, {decision.reason}")


def _judged(found: Mapping[str, Sequence[Outcome]]) -> tuple[str, str, str]:
    """Adaptive by the target alone, by the best fixed K where that pays, and each way by the target alone."""
    rates = {name: speed_ratio(outcomes, found["alone"]) for name, outcomes in found.items()}
    fixed = {name: rate for name, rate in rates.items() if name.startswith("K=")}
    of_best = ""
    if fixed and max(fixed.values()) > 1.0:
        best = max(fixed, key=fixed.__getitem__)
        of_best = f"{_marked(speed_ratio(found['adaptive'], found[best]), NEEDED_OF_FIXED)} ({best})"
    each = ", ".join(f"{name} {rate:.2f}" for name, rate in fixed.items())
    return _marked(rates["adaptive"], NEEDED), of_best, each


def _marked(share: float, needed: float) -> str:
    return f"{share:.2f}{'' if share >= needed else ' !'}"


async def first(console: Console, options: argparse.Namespace) -> None:
    """The first tokens of a request after many others, by those of the target alone."""
    table = Table("pair", "T", f"first {FIRST_TOKENS} tokens after {OTHERS} requests, by alone")
    options.fixed = ()
    for name, temperature in product(options.pairs, options.temperature):
        # A coordinator that knows nothing yet, for each temperature.
        async with started(name, options, FIRST_TOKENS) as (pair, ways, _):
            prompts, adaptive = pair.prompts(), {"adaptive": ways["adaptive"]}
            await in_turn(adaptive, prompts, 1, temperature, FIRST_TOKENS, OTHERS)
            found = await in_turn(ways, prompts, 1, temperature, FIRST_TOKENS, 2 * options.rounds, warm_up=0)
        share = speed_ratio(found["adaptive"], found["alone"])
        table.add_row(name, f"{temperature:g}", _marked(share, NEEDED))
    console.print(table)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", nargs="?", choices=["cells", "first"], default="cells")
    add("--pairs", type=names, default=list(PAIRS))
    add("--batch", type=numbers, default=[1, 4, 16])
    add("--temperature", type=floats, default=[0.0, 1.0])
    add("--max-tokens", type=numbers, default=[64, 256])
    add(
        "--fixed",
        type=lambda text: [] if text == "none" else numbers(text),
        default=[1, 2, 4, 6],
        help="lengths to compare with, or none",
    )
    add("--most", type=int, default=6, help="longest proposal of the adaptive policy")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=1, help="of each model")
    add("--pace", default="", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS], as in tandem bench")
    add("--delay", type=float, default=0.0, help="milliseconds to each service, one way")
    options = parser.parse_args()
    asyncio.run((cells if options.what == "cells" else first)(Console(highlight=False), options))


if __name__ == "__main__":
    main()
