"""Steps of a paced target that works alone, counted and timed: `python -m benchmarks.studies.target_steps`.

Its steps take at least so long whatever their size, as on a GPU that reads its weights: then one step for all streams
is what a token should cost, and the time between two steps is lost. Options that are not the study's are the
coordinator's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.common import markdown_head, markdown_row, several, study_parser
from benchmarks.contenders import BenchSettings, coordinator_of, models, prepared, through
from benchmarks.peers import Outcome, Workload
from tandem.standard_streams import write_out

_PROMPT_TOKENS = (16, 384)
"""Shortest and longest prompt of those of many lengths."""


async def main(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Measure, and print a table in Markdown."""
    settings = BenchSettings(
        pair=options.pair,
        batch=options.streams,
        max_tokens=options.max_tokens,
        num_speculative_tokens=1,
        threads=1,
        pace=f"{options.step},1",
    )
    with prepared(settings) as setup:
        text = [token for prompt in setup.pair.prompts() for token in prompt]
        async with (
            models(setup) as at,
            through(coordinator_of(setup, at.target, None, *words), speculation=False) as coordinator,
        ):
            write_out(
                f"Steps of {options.step:g} ms, {options.max_tokens} tokens, temperature {options.temperature:g}, "
                f"medians of {options.rounds}\n\n"
            )
            markdown_head("streams", "steps per token", "speed by what such steps allow", "between steps, ms")
            for streams in options.streams:
                prompts = tuple(prompt_of(text, index, streams) for index in range(streams))
                found = []
                for number in range(options.rounds + 1):
                    workload = Workload(prompts, options.temperature, options.max_tokens, seed=number)
                    began = time.perf_counter()
                    outcome = await coordinator(workload)
                    steps = (setup.logs / "target.steps").read_text()
                    found.append(_figures(outcome, began, steps, options.step / 1e3))
                figures = (statistics.median(each) for each in zip(*found[1:], strict=True))
                markdown_row(streams, *(f"{each:.2f}" for each in figures))


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


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pair", default="demo", help="as for tandem bench")
    add("--step", type=float, default=6.5, help="milliseconds")
    add("--streams", type=several(int), default=[1, 8, 16], help="requests at once, several with commas")
    add("--temperature", type=float, default=0.0)
    add("--rounds", type=int, default=3, help="workloads of each number of streams")
    add("--max-tokens", type=int, default=192, help="tokens of each completion")
    asyncio.run(main(*parser.parse_known_args()))
