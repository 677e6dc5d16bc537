"""`python -m benchmarks.studies.target_steps`: steps of a paced target that works alone, counted and timed.

Its steps take at least so long whatever their size, as on a GPU that reads its weights: then one step for all streams
is what a token should cost, and the time between two steps is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import CACHE_FOLDER, numbers
from benchmarks.contenders import Addresses, Setup, coordinator_of, services, through
from benchmarks.pairs import open_pair
from benchmarks.peers import Outcome, Workload

_PROMPT_TOKENS = (16, 384)
"""Shortest and longest prompt of those of many lengths."""


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    text = [token for prompt in pair.prompts() for token in prompt]
    async with AsyncExitStack() as stack:
        setup = Setup(
            target=pair.target,
            draft=pair.draft,
            max_length=_PROMPT_TOKENS[1] + options.max_tokens,
            max_sequences=max(options.streams),
            num_speculative_tokens=1,
            logs=Path(stack.enter_context(TemporaryDirectory(prefix="tandem-steps-"))),
            pace=f"{options.step},1",
            notes_steps=True,
        )
        addresses: Addresses = await stack.enter_async_context(services(setup, with_ahead=False))
        address = await stack.enter_async_context(
            coordinator_of(setup, addresses.target, None, *options.words)
        )
        coordinator = await stack.enter_async_context(through(address, speculation=False))
        steps = setup.logs / "target.steps"
        sys.stdout.write(
            f"Steps of {options.step:g} ms, {options.max_tokens} tokens, temperature {options.temperature:g}, medians "
            f"of {options.rounds}\n\n"
            "| streams | steps per token | speed by what such steps allow | between steps, ms |\n"
            "|---|---|---|---|\n"
        )
        for streams in options.streams:
            found = []
            for number in range(options.rounds + 1):
                prompts = tuple(prompt_of(text, index, streams) for index in range(streams))
                workload = Workload(prompts, options.temperature, options.max_tokens, seed=number)
                began = time.perf_counter()
                outcome = await coordinator.run(workload)
                found.append(_figures(outcome, began, steps.read_text(), options.step / 1e3))
            count, speed, gap = (statistics.median(each) for each in zip(*found[1:], strict=True))
            sys.stdout.write(f"| {streams} | {count:.2f} | {speed:.2f} | {gap:.2f} |\n")
            sys.stdout.flush()


def _figures(outcome: Outcome, began: float, steps: str, step_seconds: float) -> tuple[float, float, float]:
    """Steps per token, share of the possible speed, and milliseconds between steps, while all streams are decoded."""
    first = max(answer.arrivals[0][0] for answer in outcome.answers)
    last = min(answer.arrivals[-1][0] for answer in outcome.answers)
    tokens = statistics.mean(
        sum(count for seconds, count in answer.arrivals if first < seconds <= last)
        for answer in outcome.answers
    )
    times = [tuple(map(float, line.split()[:2])) for line in steps.splitlines()]
    times = [each for each in times if first < each[1] - began <= last]
    gaps = [second[0] - first[1] for first, second in pairwise(times)]
    return len(times) / tokens, tokens * step_seconds / (last - first), 1e3 * statistics.median(gaps)


def prompt_of(text: Sequence[int], index: int, streams: int) -> tuple[int, ...]:
    """The prompt of a stream: their lengths are spread evenly, and no two begin alike."""
    shortest, longest = _PROMPT_TOKENS
    length = shortest + (longest - shortest) * index // max(streams - 1, 1)
    return tuple(text[31 * index : 31 * index + length])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for, those of the coordinator under `words`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.target_steps", description=__doc__)
    add = parser.add_argument
    add("--pair", default="demo", help="as for tandem bench")
    add("--step", type=float, default=6.5, help="milliseconds")
    add("--streams", type=numbers, default=[1, 8, 16], help="requests at once, several with commas")
    add("--temperature", type=float, default=0.0)
    add("--rounds", type=int, default=3, help="workloads of each number of streams")
    add("--max-tokens", type=int, default=192, help="tokens of each completion")
    add("--cache-folder", type=Path, default=CACHE_FOLDER)
    options, words = parser.parse_known_args(arguments)
    options.words = words
    return options


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
