"""Where the time of a round goes, how many bytes it takes, and what a prefix that was served before saves."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import chain, cycle, islice

from benchmarks.common import Contender
from benchmarks.contenders import Addresses
from benchmarks.peers import Workload
from benchmarks.report import PhaseRow, PrefixGain, Spread, WireBytes
from coordinator.requests.runner import RequestRunner
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.stats.rounds import RoundResult, RoundTimes
from coordinator.telemetry.observer import Observer, RequestObserver, StreamObserver
from tandem.rpc.channels import Traffic
from tandem.types import GenerationRequest

PREFIX_TOKENS = 512
"""As many as the goal for prefix caching names."""
ENDING_TOKENS = 8
"""Tokens after the prefix, another ending each time."""
PHASES = ("draft", "verify", "sampling", "wait")


class Phases:
    """Seconds of rounds by phase, of one request or of several."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def of_request(self) -> PhasedRequest:
        """Time the rounds of a request."""
        return PhasedRequest(self.seconds)


class PhasedRequest:
    """Adds the rounds of a request that have a proposal, without the first: it waits until the draft has read the
    prompt."""

    def __init__(self, seconds: defaultdict[str, list[float]]) -> None:
        self._seconds = seconds
        self._proposed_before = False

    def add(self, proposed: int, times: RoundTimes) -> None:
        """Count a round."""
        if proposed and self._proposed_before:
            for phase in PHASES:
                self._seconds[phase].append(getattr(times, phase))
        self._proposed_before |= proposed > 0


class _Observer(Observer):
    """Times the rounds of a coordinator's requests, and counts the bytes of its streams."""

    def __init__(self) -> None:
        self.phases = Phases()
        self.traffic: defaultdict[str, list[Traffic]] = defaultdict(list)

    def begin(self, request_id: str, traceparent: str = "") -> RequestObserver:
        return _RequestObserver(self)

    def byte_count(self, role: str) -> int:
        """Bytes so far to and from all services of a role."""
        return sum(each.sent_bytes + each.received_bytes for each in self.traffic[role])


class _RequestObserver(RequestObserver):
    def __init__(self, observer: _Observer) -> None:
        self._observer = observer
        self._phases = observer.phases.of_request()

    def stream(self, role: str, address: str) -> StreamObserver:
        observer = StreamObserver()
        observer.traffic = Traffic()
        self._observer.traffic[role].append(observer.traffic)
        return observer

    def round_ended(self, result: RoundResult) -> None:
        self._phases.add(result.proposed, result.times)


class TimedCoordinator:
    """Completes requests over real services, and knows where the time went."""

    def __init__(self, completions: RequestRunner, observer: _Observer) -> None:
        self._completions = completions
        self._observer = observer

    async def run(self, workload: Workload) -> WireBytes:
        """Complete the prompts, all at once; bytes for each token."""

        async def one(index: int) -> int:
            request = GenerationRequest(
                workload.prompts[index],
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                seed=workload.seed + index,
                ignore_eos=True,
            )
            async with aclosing(self._completions.complete(request)) as chunks:
                return sum([len(chunk.token_ids) async for chunk in chunks])

        before = {role: self._observer.byte_count(role) for role in ("draft", "target")}
        tokens = sum(await asyncio.gather(*map(one, range(len(workload.prompts)))))
        counts = {role: (self._observer.byte_count(role) - each) / tokens for role, each in before.items()}
        return WireBytes(temperature=workload.temperature, draft=counts["draft"], target=counts["target"])

    def take_phases(self) -> Mapping[str, Sequence[float]]:
        """Seconds of each round since the last time this was asked for, by phase."""
        seconds = dict(self._observer.phases.seconds)
        self._observer.phases.seconds.clear()
        return seconds


@asynccontextmanager
async def timed_coordinator(
    addresses: Addresses, num_speculative_tokens: int
) -> AsyncIterator[TimedCoordinator]:
    """A coordinator in this process whose rounds are timed. It always proposes: rounds without a proposal show neither
    the phases of a round nor what a proposal weighs on the wire."""
    service = CoordinatorService(
        CoordinatorSettings(
            target_address=addresses.target,
            draft_address=addresses.draft,
            num_speculative_tokens=num_speculative_tokens,
            speculation_policy="fixed",
            # As the contender whose rounds these are: what is pushed ahead depends on how rounds happen to meet.
            draft_ahead="off",
        )
    )
    try:
        await service.start()
        observer = _Observer()
        completions = RequestRunner(service.live_config, observer)
        completions.connect(service.replicas, service.completions.models)
        yield TimedCoordinator(completions, observer)
    finally:
        await service.close()


def phase_row(
    path: str, batch: int, temperature: float, phases: Mapping[str, Sequence[float]]
) -> PhaseRow | None:
    """Medians over rounds; None when no round was timed."""
    if not all(phases.get(name) for name in PHASES):
        return None
    medians = {name: statistics.median(phases[name]) for name in PHASES}
    return PhaseRow.model_validate({"path": path, "batch": batch, "temperature": temperature, **medians})


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
