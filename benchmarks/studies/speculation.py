"""The adaptive policy from its first round, beside the target alone and every fixed K, in turn, through services.

    python -m benchmarks.studies.speculation
    python -m benchmarks.studies.speculation --pairs demo --pace 6.5,1.2,0.1 --delay 0.25 --draft-ahead auto

Each round has a coordinator that has just started, as a user's has. The first hundred tokens of each completion count
apart from the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import Contender, chosen, rotated, several, study_parser
from benchmarks.contenders import BenchSettings, coordinator_of, models, prepared, through_services
from benchmarks.pairs import DEMO
from benchmarks.peers import FIRST_TOKENS, Outcome, Workload
from tandem.admin_client import AdminClient
from tandem.client import Client

RANDOM = "random"
"""The demo target with a draft of the demo draft's shape and random weights."""
PAIRS = ("demo", "shaped:50M:1:0.5", "shaped:50M:1:0.8", RANDOM)
NEEDED = 0.97
"""Tokens per second, by those of the target alone; less is marked. The goal of docs/measurements.md."""
NEEDED_OF_FIXED = 0.90, 0.95
"""The same by those of the best fixed K (0 included), of the first tokens and of the rest."""


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


async def cells(console: Console, name: str, folder: Path, options: argparse.Namespace) -> None:
    """Completions in turn, and the medians of the ratios within a round."""
    first = f"first {FIRST_TOKENS}: by alone"
    columns = ("T", "batch", "seed", first, "by the best", "rest: by alone", "by the best", "each by alone")
    table = Table(*columns, title=name)
    decisions: list[str] = []
    settings = BenchSettings(
        pair=f"{DEMO / 'target'}:{random_draft(folder)}" if name == RANDOM else name,
        batch=options.batch,
        max_tokens=options.max_tokens,
        num_speculative_tokens=6,
        threads=1,
        rule="auto",
        pace=options.pace,
        delay=options.delay,
    )
    ahead = ("--draft-ahead", options.draft_ahead)
    async with AsyncExitStack() as stack:
        setup = stack.enter_context(prepared(settings))
        at = await stack.enter_async_context(models(setup))
        fixed = coordinator_of(setup, at.target, at.draft, "--speculation-policy", "fixed", *ahead)
        client = await stack.enter_async_context(Client(await stack.enter_async_context(fixed)))
        for heat, batch, is_seeded in product(options.temperature, options.batch, options.seeded):
            seed: dict[str, Any] = {} if is_seeded else {"seed": None}
            ways: dict[str, Contender] = {
                f"K={count}": through_services(client, num_speculative_tokens=count, **seed)
                for count in options.fixed
            }
            ways["alone"] = through_services(client, speculation=False, **seed)
            found: dict[str, list[Outcome]] = {way: [] for way in (*ways, "adaptive")}
            made: Sequence[Any] = ()
            for number in range(options.rounds):
                prompts = chosen(setup.pair.prompts(), batch, number)
                workload = Workload(prompts, heat, options.max_tokens, seed=number)
                async with (
                    coordinator_of(setup, at.target, at.draft, *ahead) as address,
                    Client(address) as own,
                    AdminClient(address) as admin,
                ):
                    all_ways = {**ways, "adaptive": through_services(own, **seed)}
                    for way in rotated(list(all_ways), number):
                        found[way].append(await all_ways[way](workload))
                    made = (await admin.stats()).decisions
            decisions += [f"{each.rule}, temperature {each.temperatures}, {each.reason}" for each in made]
            table.add_row(f"{heat:g}", str(batch), "yes" if is_seeded else "no", *_judged(found))
    console.print(table)
    for line in dict.fromkeys(decisions):
        console.print(line)


def _judged(found: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Adaptive by the target alone and by the best fixed K, in the first tokens and in the rest."""
    words, each = [], ""
    parts = ((0, FIRST_TOKENS, NEEDED_OF_FIXED[0]), (FIRST_TOKENS, 1 << 30, NEEDED_OF_FIXED[1]))
    for begin, end, needed in parts:
        speeds = {way: [one.speed_between(begin, end) for one in outcomes] for way, outcomes in found.items()}
        rates = {way: _ratio(speeds[way], speeds["alone"]) for way in speeds}
        adaptive = rates.pop("adaptive")
        best = max(rates, key=rates.__getitem__)
        of_best = _ratio(speeds["adaptive"], speeds[best])
        words += [_marked(adaptive, NEEDED), f"{_marked(of_best, needed)} ({best})"]
        each = ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items() if way != "alone")
    return [*words, each]


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))


def _marked(share: float, needed: float) -> str:
    return f"{share:.2f}{'' if share >= needed else ' !'}"


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pairs", type=several(str), default=list(PAIRS))
    add("--batch", type=several(int), default=[1, 4, 16])
    add("--temperature", type=several(float), default=[0.0, 0.7, 1.0])
    add("--seeded", type=several("yes".__eq__), default=[False], help="no,yes")
    add("--max-tokens", type=int, default=300)
    add("--fixed", type=several(int), default=[1, 2, 4, 6], help="lengths to compare with")
    add("--rounds", type=int, default=3)
    add("--draft-ahead", default="auto", help="of every coordinator")
    add("--pace", default="", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS], as in tandem bench")
    add("--delay", type=float, default=0.0, help="milliseconds to each service, one way")
    options = parser.parse_args()
    for name in options.pairs:
        with TemporaryDirectory(prefix="tandem-speculation-") as folder:
            asyncio.run(cells(Console(highlight=False), name, Path(folder), options))
