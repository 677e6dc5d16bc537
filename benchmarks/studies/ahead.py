"""`python -m benchmarks.studies.ahead`: drafting ahead beside the synchronous split and one process, at every K.

All contenders run in turn within one run, on the same prompts. With `--pace` and `--delay` two cores play two devices:
steps take at least so long, and everything between coordinator and services is held back.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import CACHE_FOLDER, Contender, floats, in_turn, numbers, speed
from benchmarks.contenders import CONTENDERS, Setup, coordinator_of, services, through
from benchmarks.pairs import open_pair


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    prompts = pair.prompts()
    async with AsyncExitStack() as stack:
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            max_length=max(map(len, prompts)) + options.max_tokens,
            max_sequences=max(options.batch, 2),
            num_speculative_tokens=max(options.tokens),
            logs=Path(stack.enter_context(TemporaryDirectory(prefix="tandem-ahead-"))),
            pace=options.pace,
            delay_ms=options.delay,
            rule=options.rule,
        )
        addresses = await stack.enter_async_context(services(setup))
        ways: dict[str, Contender] = {}
        for tokens in options.tokens:
            own = replace(setup, num_speculative_tokens=tokens)
            if options.one_process:
                peer = CONTENDERS["one-process"].start(own, addresses)
                ways[f"one process {tokens}"] = await stack.enter_async_context(peer)
            for name, ahead in (("synchronous", "off"), ("ahead", options.ahead)):
                words = ("--speculation-policy", options.policy, "--draft-ahead", ahead)
                coordinator = coordinator_of(own, addresses.target, addresses.draft, *words)
                address = await stack.enter_async_context(coordinator)
                ways[f"{name} {tokens}"] = await stack.enter_async_context(through(address))
        for temperature in options.temperature:
            found = await in_turn(
                ways, prompts, options.batch, temperature, options.max_tokens, options.rounds
            )
            milliseconds = {name: 1e3 / speed(outcomes) for name, outcomes in found.items()}
            sys.stdout.write("\n".join(_table(options, milliseconds, temperature)) + "\n")
            sys.stdout.flush()


def _table(options: argparse.Namespace, milliseconds: dict[str, float], temperature: float) -> list[str]:
    names = list(dict.fromkeys(name.rpartition(" ")[0] for name in milliseconds))
    lines = [
        f"Temperature {temperature:g}, {options.rule or 'default rule'}, batch {options.batch}, pace "
        f"{options.pace or 'none'}, one way {options.delay:g} ms, {options.pair}: ms a token, medians of "
        f"{options.rounds} rounds of {options.max_tokens} tokens",
        "",
        f"| K | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]

    def at(name: str, tokens: int) -> float:
        return milliseconds[f"{name} {tokens}"]

    lines += [
        f"| {tokens} | {' | '.join(f'{at(name, tokens):.3f}' for name in names)} |"
        for tokens in options.tokens
    ]
    best = {name: min(at(name, tokens) for tokens in options.tokens) for name in names}
    return [
        *lines,
        "",
        *(f"best {name} by best ahead: {best[name] / best['ahead']:.2f}" for name in names),
        "",
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.ahead", description=__doc__)
    add = parser.add_argument
    add("--pair", default="demo", help="as for tandem bench")
    add("--pace", default="6.5,1.2,0.1", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]; empty: none")
    add("--delay", type=float, default=0.25, help="milliseconds, one way")
    add("--tokens", type=numbers, default=[2, 3, 4, 5, 6], help="K, several with commas")
    add("--temperature", type=floats, default=[0.0], help="several with commas")
    add("--rule", default="", help="rejection_sampling_strategy")
    add("--ahead", default="auto", help="draft_ahead of the contender that drafts ahead")
    add("--policy", default="fixed", help="speculation_policy of the coordinators")
    add("--batch", type=int, default=1, help="requests at once")
    add("--rounds", type=int, default=5, help="completions of each way")
    add("--max-tokens", type=int, default=96, help="tokens of each completion")
    add("--one-process", action=argparse.BooleanOptionalAction, default=True)
    add("--cache-folder", type=Path, default=CACHE_FOLDER)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
