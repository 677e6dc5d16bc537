"""Where the time of a round goes, how many bytes it takes, and what a prefix that was served before saves."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from itertools import chain, cycle, islice

from benchmarks.common import Contender
from benchmarks.contenders import Addresses
from benchmarks.peers import Workload
from benchmarks.report import PhaseRow, PrefixGain, Spread, WireBytes
from coordinator.decoding.completion import Completion
from coordinator.decoding.loop import AcceptanceRule, Drafter, Verifier
from coordinator.requests.runner import RequestRunner
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.stats.rounds import RoundResult
from coordinator.telemetry.observer import EventValue, Observer, RequestObserver
from tandem.types import Acceptance, GenerationRequest, Proposal, Verification

PREFIX_TOKENS = 512
"""As many as the goal for prefix caching names; see docs/benchmarks.md."""
ENDING_TOKENS = 8
_CHUNK_BYTES = 1 << 16

Phases = Mapping[str, Sequence[float]]
"""Seconds of each round by phase. `wait` lies between an acceptance and the next proposal."""


class WatchedRequest:
    """Stands in for drafter, verifier and rule of one request in the round loop, and times them."""

    def __init__(
        self,
        seconds: defaultdict[str, list[float]],
        drafter: Drafter,
        verifier: Verifier,
        decide: AcceptanceRule,
    ) -> None:
        """
        Args:
            seconds: Gets the times of each round with a proposal, by phase. Requests may share it. The first such round
                does not count: it waits until the draft has read the prompt.
            drafter: Of the request.
            verifier: Of the request.
            decide: Its acceptance rule.
        """
        self._seconds = seconds
        self._drafter = drafter
        self._verifier = verifier
        self._decide = decide
        self._ended = 0.0
        self._round: dict[str, float] = {}
        self._proposed_before = False

    async def propose(self, completion: Completion) -> Proposal:
        """See `Drafter`."""
        started = time.perf_counter()
        self._round = {"wait": started - self._ended}
        proposal = await self._drafter.propose(completion)
        self._round["draft"] = time.perf_counter() - started
        return proposal

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """See `Verifier`."""
        started = time.perf_counter()
        verification = await self._verifier.verify(completion, proposal)
        self._round["verify"] = time.perf_counter() - started
        return verification

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        """See `AcceptanceRule`."""
        started = time.perf_counter()
        acceptance = self._decide(proposal, verification)
        self._ended = time.perf_counter()
        self._round["sampling"] = self._ended - started
        if len(proposal):
            if self._proposed_before:
                for phase, seconds in self._round.items():
                    self._seconds[phase].append(seconds)
            self._proposed_before = True
        return acceptance


class PhaseObserver(Observer):
    """Times the rounds of all requests of a coordinator."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def begin(self, request_id: str, traceparent: str = "") -> _PhasedRequest:
        """Observe a request."""
        return _PhasedRequest(self.seconds)


class _PhasedRequest(RequestObserver):
    def __init__(self, seconds: defaultdict[str, list[float]]) -> None:
        self._seconds = seconds
        self._proposed_before = False

    def round_ended(self, result: RoundResult) -> None:
        if result.proposed and self._proposed_before:
            for phase in ("wait", "draft", "verify", "sampling"):
                self._seconds[phase].append(getattr(result.times, phase))
        self._proposed_before |= result.proposed > 0

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        # A draft that was late or lost would spoil the measurement: it is noted.
        self._seconds[name].append(0.0)


class TimedCoordinator:
    """Completes requests over real services, and knows where the time went."""

    def __init__(self, completions: RequestRunner, observer: PhaseObserver) -> None:
        self._completions = completions
        self._observer = observer

    async def run(self, workload: Workload) -> int:
        """Complete the prompts, all at once; the number of tokens."""

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

        return sum(await asyncio.gather(*map(one, range(len(workload.prompts)))))

    def take_phases(self) -> Phases:
        """Seconds of each round since the last time this was asked for, by phase."""
        seconds = dict(self._observer.seconds)
        self._observer.seconds.clear()
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
        observer = PhaseObserver()
        completions = RequestRunner(service.live_config, observer)
        completions.connect(service.replicas, service.completions.models)
        yield TimedCoordinator(completions, observer)
    finally:
        await service.close()


def phase_row(path: str, batch: int, temperature: float, phases: Phases) -> PhaseRow | None:
    """Medians over rounds; None when no round was timed."""
    names = ("draft", "verify", "sampling", "wait")
    if not all(phases.get(name) for name in names):
        return None
    medians = {name: statistics.median(phases[name]) for name in names}
    return PhaseRow.model_validate({"path": path, "batch": batch, "temperature": temperature, **medians})


class Relay:
    """Forwards everything in both directions, and counts the bytes."""

    def __init__(self, host: str, port: int) -> None:
        self.address = ""
        """Its own."""
        self.byte_count = 0
        """Bytes passed on, both directions together."""
        self._host = host
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, onward_writer]
        await asyncio.gather(self._pass_on(reader, onward_writer), self._pass_on(onward_reader, writer))

    def drop(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self.byte_count += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one end is gone; so is the other in a moment
        finally:
            writer.close()


@asynccontextmanager
async def relay(address: str) -> AsyncIterator[Relay]:
    """A relay to a server."""
    host, _, port = address.rpartition(":")
    passing = Relay(host, int(port))
    server = await asyncio.start_server(passing.accept, "127.0.0.1")
    passing.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield passing
    finally:
        server.close()
        passing.drop()


async def wire_bytes(addresses: Addresses, num_speculative_tokens: int, workload: Workload) -> WireBytes:
    """Bytes of the workload on the wire, counted by relays between coordinator and services."""
    async with AsyncExitStack() as stack:
        target, draft = [
            await stack.enter_async_context(relay(address)) for address in (addresses.target, addresses.draft)
        ]
        relayed = replace(addresses, target=target.address, draft=draft.address)
        coordinator = await stack.enter_async_context(timed_coordinator(relayed, num_speculative_tokens))
        # Neither the connections count nor a first request that the draft was not ready for.
        await coordinator.run(workload)
        before = target.byte_count, draft.byte_count
        tokens = await coordinator.run(workload)
        return WireBytes(
            temperature=workload.temperature,
            draft=(draft.byte_count - before[1]) / tokens,
            target=(target.byte_count - before[0]) / tokens,
        )


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
