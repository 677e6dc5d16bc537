"""Where the time of a round goes and how many bytes it takes, by a coordinator's metrics, and the gain of a prefix."""

from __future__ import annotations

import asyncio
import statistics
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain, cycle, islice

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import Contender, free_port
from benchmarks.contenders import PREFIX_TOKENS, Addresses, Setup, coordinator_of, through
from benchmarks.peers import Workload
from benchmarks.report import Table

PHASES = ("draft", "verify", "sampling", "wait")
PEERS = ("draft", "target")
ENDING_TOKENS = 8
"""Tokens after the prefix, another ending each time."""

Timed = Callable[[Workload], Awaitable[tuple[Mapping[str, float], list[float]]]]
"""Completes a workload; mean seconds of a round by phase, and bytes for each token by peer."""


@asynccontextmanager
async def timed_coordinator(setup: Setup, addresses: Addresses) -> AsyncIterator[Timed]:
    """A coordinator that always proposes and never drafts ahead: rounds without a proposal show neither the phases of a
    round nor what a proposal weighs on the wire, and what is pushed ahead depends on how rounds happen to meet."""
    port = free_port()
    words = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--prometheus-port", str(port))

    def totals() -> Counter[tuple[str, str]]:
        """Values by name, and by phase or peer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: Counter[tuple[str, str]] = Counter()
        for sample in chain.from_iterable(family.samples for family in families):
            found[sample.name, sample.labels.get("phase", sample.labels.get("peer", ""))] += sample.value  # type: ignore[assignment]
        return found

    async with through(coordinator_of(setup, addresses.target, addresses.draft, *words)) as contender:

        async def run(workload: Workload) -> tuple[Mapping[str, float], list[float]]:
            before = await asyncio.to_thread(totals)
            outcome = await contender.run(workload)
            used = await asyncio.to_thread(totals)
            used.subtract(before)
            name = "tandem_round_phase_seconds"
            counts = {phase: used[f"{name}_count", phase] for phase in PHASES}
            means = {phase: used[f"{name}_sum", phase] / count for phase, count in counts.items() if count}
            return means, [used["tandem_wire_bytes_total", peer] / outcome.token_count for peer in PEERS]

        yield run


async def prefix_gain(
    contender: Contender, prompts: Sequence[tuple[int, ...]], rounds: int
) -> tuple[Table, float]:
    """Ask for one token after a new prefix, then for one after the same prefix and another ending.

    Returns:
        Times to the first token, and the median over rounds of the second by the first.

    Raises:
        TandemError: the contender failed.
    """

    async def first_token_seconds(prompt: tuple[int, ...]) -> float:
        outcome = await contender.run(Workload((prompt,), 0.0, 2))
        return outcome.answers[0].arrivals[0][0]

    first, again = [], []
    for number in range(rounds):
        # Another text in each round, and other first tokens: nothing of it was served before.
        text = [*prompts[-1 - number], *chain.from_iterable(prompts[number:])]
        prefix = tuple(islice(cycle(text), PREFIX_TOKENS))
        first.append(await first_token_seconds(prefix + prompts[0][:ENDING_TOKENS]))
        again.append(await first_token_seconds(prefix + prompts[1][-ENDING_TOKENS:]))
    ratio = statistics.median(b / a for a, b in zip(first, again, strict=True))
    spreads = [(statistics.median(each), min(each), max(each)) for each in (first, again)]
    table = Table(
        title=f"Time to first token, {PREFIX_TOKENS} tokens of prefix",
        columns=(
            ("prefix", ""),
            *((name, "seconds") for name in ("median", "lowest", "highest")),
            ("by the first", "ratio"),
        ),
        rows=(("the first time", *spreads[0], None), ("again", *spreads[1], ratio)),
    )
    return table, ratio
