"""Where the time of a round goes and how many bytes it takes, by a coordinator's metrics, and the gain of a prefix."""

from __future__ import annotations

import asyncio
import statistics
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain, cycle, islice

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import Contender, free_port
from benchmarks.contenders import PREFIX_TOKENS, Addresses, Setup, coordinator_of, through
from benchmarks.peers import Workload
from benchmarks.report import PhaseRow, PrefixGain, Spread, WireBytes

PHASES = ("draft", "verify", "sampling", "wait")
ENDING_TOKENS = 8
"""Tokens after the prefix, another ending each time."""


class TimedCoordinator:
    """A coordinator and its metrics."""

    def __init__(self, contender: Contender, metrics_url: str) -> None:
        self._contender = contender
        self._metrics_url = metrics_url

    async def run(self, workload: Workload) -> tuple[Mapping[str, float], WireBytes]:
        """Complete the prompts, all at once; mean seconds of a round by phase, and bytes for each token."""
        before = await asyncio.to_thread(self._totals)
        outcome = await self._contender.run(workload)
        used = await asyncio.to_thread(self._totals)
        used.subtract(before)
        name = "tandem_round_phase_seconds"
        counts = {phase: used[f"{name}_count", phase] for phase in PHASES}
        phases = {phase: used[f"{name}_sum", phase] / count for phase, count in counts.items() if count}
        draft, target = (
            used["tandem_wire_bytes_total", peer] / outcome.token_count for peer in ("draft", "target")
        )
        return phases, WireBytes(temperature=workload.temperature, draft=draft, target=target)

    def _totals(self) -> Counter[tuple[str, str]]:
        """Values by name, and by phase or peer."""
        with urllib.request.urlopen(self._metrics_url, timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: Counter[tuple[str, str]] = Counter()
        for sample in chain.from_iterable(family.samples for family in families):
            found[sample.name, sample.labels.get("phase", sample.labels.get("peer", ""))] += sample.value  # type: ignore[assignment]
        return found


@asynccontextmanager
async def timed_coordinator(setup: Setup, addresses: Addresses) -> AsyncIterator[TimedCoordinator]:
    """A coordinator that always proposes and never drafts ahead: rounds without a proposal show neither the phases of a
    round nor what a proposal weighs on the wire, and what is pushed ahead depends on how rounds happen to meet."""
    port = free_port()
    words = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--prometheus-port", str(port))
    async with through(coordinator_of(setup, addresses.target, addresses.draft, *words)) as contender:
        yield TimedCoordinator(contender, f"http://127.0.0.1:{port}/metrics")


def phase_row(path: str, batch: int, temperature: float, phases: Mapping[str, float]) -> list[PhaseRow]:
    """A row of mean seconds; none when no round was timed."""
    row = {"path": path, "batch": batch, "temperature": temperature, **phases}
    return [PhaseRow.model_validate(row)] if phases else []


async def prefix_gain(contender: Contender, prompts: Sequence[tuple[int, ...]], rounds: int) -> PrefixGain:
    """Ask for one token after a new prefix, then for one after the same prefix and another ending.

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
    return PrefixGain(
        prefix_tokens=PREFIX_TOKENS,
        first_seconds=Spread.of(first),
        again_seconds=Spread.of(again),
        ratio=statistics.median(b / a for a, b in zip(first, again, strict=True)),
    )
