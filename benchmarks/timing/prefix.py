"""Time to first token of a prompt that begins as one that was served before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain, cycle, islice

from benchmarks.contenders import Contender
from benchmarks.reports.report import PrefixGain, Spread
from benchmarks.workload import Workload

PREFIX_TOKENS = 512
ENDING_TOKENS = 8


async def prefix_gain(contender: Contender, prompts: Sequence[tuple[int, ...]], rounds: int) -> PrefixGain:
    """Ask for one token after a new prefix, then for one after the same prefix and another ending.

    Raises:
        TandemError: the contender failed.
    """
    first, again = [], []
    for number in range(rounds):
        # Another text in each round, and other first tokens: nothing of it was served before.
        text = [*prompts[-1 - number], *chain.from_iterable(prompts[number:])]
        prefix = tuple(islice(cycle(text), PREFIX_TOKENS))
        first.append(await _first_token_seconds(contender, prefix + prompts[0][:ENDING_TOKENS]))
        again.append(await _first_token_seconds(contender, prefix + prompts[1][-ENDING_TOKENS:]))
    return PrefixGain(
        prefix_tokens=PREFIX_TOKENS,
        first_seconds=Spread.of(first),
        again_seconds=Spread.of(again),
        ratio=statistics.median(b / a for a, b in zip(first, again, strict=True)),
    )


async def _first_token_seconds(contender: Contender, prompt: tuple[int, ...]) -> float:
    outcome = await contender.run(Workload((prompt,), 0.0, 2))
    return outcome.answers[0].arrivals[0][0]
