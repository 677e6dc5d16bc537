"""`python -m benchmarks.studies.ahead`: drafting ahead beside the synchronous split and one process, at every K.

All contenders run in turn within one run, on the same prompts. With `--pace` and `--delay` two cores play two devices:
steps take at least so long, and everything between coordinator and services is held back.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.compared_services import Addresses, Setup, services
from benchmarks.contenders import CONTENDERS, Contender, ThroughServices
from benchmarks.models.pairs import open_pair
from benchmarks.services import service
from benchmarks.workload import Workload
from tandem.client import Client


@dataclass(frozen=True, slots=True)
class Way:
    """One way of decoding with one K."""

    name: str
    tokens: int
    contender: Contender


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    prompts = pair.prompts()
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-ahead-")))
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            dtype="bfloat16",
            threads=1,
            device="cpu",
            max_length=max(map(len, prompts)) + options.max_tokens,
            max_sequences=max(options.batch, 2),
            num_speculative_tokens=max(options.tokens),
            logs=logs,
            pace=options.pace,
            delay_ms=options.delay,
            rule=options.rule,
        )
        addresses = await stack.enter_async_context(services(setup, prefix_caching=False))
        ways = [way async for way in _ways(options, setup, addresses, stack)]
        for temperature in options.temperature:
            seconds = await _measured(options, ways, prompts, temperature)
            _print_table(options, ways, seconds, temperature)


async def _ways(
    options: argparse.Namespace, setup: Setup, addresses: Addresses, stack: AsyncExitStack
) -> AsyncIterator[Way]:
    for tokens in options.tokens:
        own = replace(setup, num_speculative_tokens=tokens)
        if options.one_process:
            peer = CONTENDERS["one-process"].start(own, addresses)
            yield Way("one process", tokens, await stack.enter_async_context(peer))
        for name, ahead in (("synchronous", "off"), ("ahead", options.ahead)):
            yield Way(
                name, tokens, await stack.enter_async_context(_through(own, addresses, ahead, options.policy))
            )


@asynccontextmanager
async def _through(setup: Setup, addresses: Addresses, ahead: str, policy: str) -> AsyncIterator[Contender]:
    arguments = [
        *("--target-address", addresses.target, "--draft-address", addresses.draft),
        *("--num-speculative-tokens", str(setup.num_speculative_tokens)),
        *("--speculation-policy", policy, "--draft-ahead", ahead),
    ]
    if setup.rule:
        arguments += ["--rejection-sampling-strategy", setup.rule]
    async with service("coordinator", *arguments) as address, Client(address) as client:
        yield ThroughServices(client, speculation=True)


async def _measured(
    options: argparse.Namespace, ways: Sequence[Way], prompts: Sequence[Sequence[int]], temperature: float
) -> dict[tuple[str, int], list[float]]:
    """Seconds for each token of every way, one figure for each round."""
    found: dict[tuple[str, int], list[float]] = {(way.name, way.tokens): [] for way in ways}
    for number in range(options.rounds + 1):
        chosen = [prompts[(number * options.batch + i) % len(prompts)] for i in range(options.batch)]
        workload = Workload(tuple(map(tuple, chosen)), temperature, options.max_tokens, seed=number)
        for way in ways if number % 2 else ways[::-1]:
            outcome = await way.contender.run(workload)
            if number:  # the first of each warms up
                tokens = sum(len(answer.token_ids) for answer in outcome.answers)
                found[way.name, way.tokens].append(outcome.seconds / tokens)
            sys.stderr.write(f"\r{temperature:g} {number} {way.name} {way.tokens}      ")
    return found


def _print_table(
    options: argparse.Namespace,
    ways: Sequence[Way],
    seconds: dict[tuple[str, int], list[float]],
    temperature: float,
) -> None:
    medians = {key: statistics.median(values) * 1e3 for key, values in seconds.items()}
    names = list(dict.fromkeys(way.name for way in ways))
    lines = [
        f"Temperature {temperature:g}, {options.rule or 'default rule'}, batch {options.batch}, pace "
        f"{options.pace or 'none'}, one way {options.delay:g} ms, {options.pair}: ms a token, medians of "
        f"{options.rounds} rounds of {options.max_tokens} tokens",
        "",
        f"| K | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    lines += [
        f"| {tokens} | {' | '.join(f'{medians[name, tokens]:.3f}' for name in names)} |"
        for tokens in options.tokens
    ]
    best = {name: min(medians[name, tokens] for tokens in options.tokens) for name in names}
    lines += ["", *(f"best {name} by best ahead: {best[name] / best['ahead']:.2f}" for name in names), ""]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.ahead", description=__doc__)
    parser.add_argument("--pair", default="demo", help="as for tandem bench")
    parser.add_argument(
        "--pace", default="6.5,1.2,0.1", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]; empty: none"
    )
    parser.add_argument("--delay", type=float, default=0.25, help="milliseconds, one way")
    parser.add_argument("--tokens", type=_numbers, default=[2, 3, 4, 5, 6], help="K, several with commas")
    parser.add_argument("--temperature", type=_floats, default=[0.0], help="several with commas")
    parser.add_argument("--rule", default="", help="rejection_sampling_strategy")
    parser.add_argument("--ahead", default="auto", help="draft_ahead of the contender that drafts ahead")
    parser.add_argument("--policy", default="fixed", help="speculation_policy of the coordinators")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--rounds", type=int, default=5, help="completions of each way")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each completion")
    parser.add_argument("--one-process", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cache-folder", type=Path, default=Path.home() / ".cache" / "tandem" / "bench")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
