"""`python -m benchmarks.studies.leads`: a paced pair with and without leads of the target, beside one process.

Ways that share the services take turns with each other and with the same loop in one process, which is measured with
several lengths of a proposal; its best one counts. The controller decides the lengths of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import CACHE_FOLDER, Contender, floats, numbers
from benchmarks.contenders import CONTENDERS, Addresses, Setup, ThroughServices, coordinator_of, services
from benchmarks.pairs import open_pair
from benchmarks.peers import Outcome, Workload
from tandem.client import Client

_WAYS = {
    "synchronous": ("--draft-ahead", "off", "--target-lead", "0"),
    "ahead, no lead": ("--target-lead", "0"),
    "ahead": (),
}
"""Options of the coordinators."""


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    prompts = pair.prompts()
    async with AsyncExitStack() as stack:
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            max_length=max(map(len, prompts)) + options.max_tokens,
            max_sequences=options.batch,
            num_speculative_tokens=max(options.proposals),
            logs=Path(stack.enter_context(TemporaryDirectory(prefix="tandem-leads-"))),
            pace=options.pace,
            rule=options.rule,
        )
        addresses: Addresses = await stack.enter_async_context(services(setup, with_ahead=False))
        contenders: dict[str, Contender] = {}
        for name, words in _WAYS.items():
            address = await stack.enter_async_context(
                coordinator_of(setup, addresses.target, addresses.draft, *words, *options.words)
            )
            client = await stack.enter_async_context(Client(address))
            contenders[name] = ThroughServices(client, ignore_eos=not options.eos)
        for tokens in options.proposals if options.batch == 1 else ():
            start = CONTENDERS["one-process"].start
            own = replace(setup, num_speculative_tokens=tokens)
            contenders[f"one process, K {tokens}"] = await stack.enter_async_context(start(own, addresses))
        sys.stdout.write(
            f"`{options.rule}`, paced {options.pace} ms, batch {options.batch}, {options.max_tokens} tokens, medians "
            f"of {options.rounds}, load {os.getloadavg()[0]:.1f}\n\n"
            "| temperature | way | ms a token | speed by the best one process | by synchronous | tokens a round "
            "| led | wasted |\n|---|---|---|---|---|---|---|---|\n"
        )
        for temperature in options.temperature:
            found: dict[str, list[Outcome]] = {name: [] for name in contenders}
            for number in range(2 + options.rounds):
                chosen = [
                    prompts[(options.batch * number + index) % len(prompts)] for index in range(options.batch)
                ]
                workload = Workload(tuple(chosen), temperature, options.max_tokens, seed=100 * number)
                for name, contender in contenders.items():
                    found[name].append(await contender.run(workload))
            # In the first two rounds the controller learns acceptance
            _show(temperature, {name: each[2:] for name, each in found.items()})


def _show(temperature: float, found: dict[str, list[Outcome]]) -> None:
    taken = {name: statistics.median(map(_milliseconds, outcomes)) for name, outcomes in found.items()}
    alone = [each for name, each in taken.items() if name.startswith("one process")]
    for name, outcomes in found.items():
        tokens, rounds = (sum(getattr(each, what) for each in outcomes) for what in ("token_count", "rounds"))
        led, wasted = (sum(getattr(each, what) for each in outcomes) for what in ("led", "wasted"))
        by_one = f"{min(alone) / taken[name]:.2f}" if alone else "-"
        by_synchronous = f"{taken['synchronous'] / taken[name]:.2f}"
        sys.stdout.write(
            f"| {temperature:g} | {name} | {taken[name]:.3f} | {by_one} | {by_synchronous} | {tokens / rounds:.2f} | "
            f"{led / rounds:.0%} | {wasted / (rounds + wasted):.1%} |\n"
        )
    sys.stdout.flush()


def _milliseconds(outcome: Outcome) -> float:
    """Milliseconds of a token of one stream, behind its first tokens."""
    each = []
    for answer in outcome.answers:
        (first, at_first), (last, _) = answer.arrivals[0], answer.arrivals[-1]
        each.append(1e3 * (last - first) / max(len(answer.token_ids) - at_first, 1))
    return statistics.mean(each)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for, those of the coordinators under `words`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.leads", description=__doc__)
    add = parser.add_argument
    add("--pair", default="demo", help="as for tandem bench")
    add("--pace", default="6.5,1.2", help="as for tandem bench")
    add("--rule", default="strict")
    add("--temperature", type=floats, default=[0.0, 0.7], help="several with commas")
    add("--batch", type=int, default=1, help="requests at once; one process is measured with one")
    add(
        "--proposals", type=numbers, default=[4, 6, 8], help="of one process; the others' most is the longest"
    )
    add("--rounds", type=int, default=5, help="of each way")
    add("--max-tokens", type=int, default=192, help="tokens of each completion")
    add("--eos", action="store_true", help="let completions end by themselves")
    add("--cache-folder", type=Path, default=CACHE_FOLDER)
    options, words = parser.parse_known_args(arguments)
    options.words = words
    return options


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
