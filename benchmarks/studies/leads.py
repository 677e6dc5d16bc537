"""A paced pair with and without leads of the target, beside one process: `python -m benchmarks.studies.leads`.

Ways that share the services take turns with each other and with the same loop in one process, which is measured with
several lengths of a proposal; its best one counts. The controller decides the lengths of the others. Options that are
not the study's are the coordinators'.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from benchmarks.common import Contender, chosen, markdown_head, markdown_row, several, study_parser
from benchmarks.contenders import CONTENDERS, BenchSettings, coordinator_of, models, prepared, through
from benchmarks.peers import Outcome, Workload
from tandem.standard_streams import write_out

_WAYS = {
    "synchronous": ("--draft-ahead", "off", "--target-lead", "0"),
    "ahead, no lead": ("--target-lead", "0"),
    "ahead": (),
}
"""Options of the coordinators."""


async def main(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Measure, and print a table in Markdown."""
    settings = BenchSettings(
        pair=options.pair,
        batch=(options.batch,),
        max_tokens=options.max_tokens,
        num_speculative_tokens=max(options.proposals),
        rule=options.rule,
        threads=1,
        pace=options.pace,
    )
    async with AsyncExitStack() as stack:
        setup = stack.enter_context(prepared(settings))
        at = await stack.enter_async_context(models(setup))
        contenders: dict[str, Contender] = {}
        for name, own in _WAYS.items():
            coordinator = coordinator_of(setup, at.target, at.draft, *own, *words)
            way = through(coordinator, ignore_eos=not options.eos)
            contenders[name] = await stack.enter_async_context(way)
        for tokens in options.proposals if options.batch == 1 else ():
            fixed = settings.model_copy(update={"num_speculative_tokens": tokens})
            one = CONTENDERS["one-process"].start(replace(setup, settings=fixed), at)
            contenders[f"one process, K {tokens}"] = await stack.enter_async_context(one)
        write_out(
            f"`{options.rule}`, paced {options.pace} ms, batch {options.batch}, {options.max_tokens} tokens, medians "
            f"of {options.rounds}, load {os.getloadavg()[0]:.1f}\n\n"
        )
        by = ("speed by the best one process", "by synchronous")
        markdown_head("temperature", "way", "ms a token", *by, "tokens a round", "led", "wasted")
        for temperature in options.temperature:
            found: dict[str, list[Outcome]] = {name: [] for name in contenders}
            for number in range(2 + options.rounds):
                prompts = chosen(setup.pair.prompts(), options.batch, number)
                workload = Workload(prompts, temperature, options.max_tokens, seed=100 * number)
                for name, contender in contenders.items():
                    found[name].append(await contender(workload))
            # In the first two rounds the controller learns acceptance
            _show(temperature, {name: each[2:] for name, each in found.items()})


def _show(temperature: float, found: dict[str, list[Outcome]]) -> None:
    taken = {name: statistics.median(map(_milliseconds, outcomes)) for name, outcomes in found.items()}
    alone = [each for name, each in taken.items() if name.startswith("one process")]
    for name, outcomes in found.items():
        tokens, rounds, led, wasted = (
            sum(getattr(each, what) for each in outcomes)
            for what in ("token_count", "rounds", "led", "wasted")
        )
        markdown_row(
            f"{temperature:g}",
            name,
            f"{taken[name]:.3f}",
            f"{min(alone) / taken[name]:.2f}" if alone else "-",
            f"{taken['synchronous'] / taken[name]:.2f}",
            f"{tokens / rounds:.2f}",
            f"{led / rounds:.0%}",
            f"{wasted / (rounds + wasted):.1%}",
        )


def _milliseconds(outcome: Outcome) -> float:
    """Milliseconds of a token of one stream, behind its first tokens."""
    each = []
    for answer in outcome.answers:
        (first, at_first), (last, _) = answer.arrivals[0], answer.arrivals[-1]
        each.append(1e3 * (last - first) / max(len(answer.token_ids) - at_first, 1))
    return statistics.mean(each)


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pair", default="demo", help="as for tandem bench")
    add("--pace", default="6.5,1.2", help="as for tandem bench")
    add("--rule", default="strict")
    add("--temperature", type=several(float), default=[0.0, 0.7], help="several with commas")
    add("--batch", type=int, default=1, help="requests at once; one process is measured with one")
    add(
        "--proposals",
        type=several(int),
        default=[4, 6, 8],
        help="of one process; the others' most is the longest",
    )
    add("--rounds", type=int, default=5, help="of each way")
    add("--max-tokens", type=int, default=192, help="tokens of each completion")
    add("--eos", action="store_true", help="let completions end by themselves")
    asyncio.run(main(*parser.parse_known_args()))
