"""Times the phases of a round: stopwatches around the three callables of the round loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from coordinator.decoding.completion import Completion
from coordinator.decoding.loop import AcceptanceRule, Drafter, Verifier
from coordinator.stats.rounds import RoundResult
from coordinator.telemetry.observer import EventValue, NoObserver
from tandem.types import Acceptance, Proposal, Verification


class Stopwatch:
    """Seconds of each round that had a proposal, by phase. The first such round of each request does not count.

    `wait` is what lies between an acceptance and the next proposal: committing, text, and handing the piece on.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, phases: Mapping[str, float]) -> None:
        """Count a round: its seconds by phase."""
        for phase, seconds in phases.items():
            self.seconds[phase].append(seconds)

    def watch(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> tuple[Drafter, Verifier, AcceptanceRule]:
        """Wrap the three with timers for one request. Requests may share the stopwatch."""
        watched = _WatchedRequest(self, drafter, verifier, accept)
        return watched, watched, watched.accept


class _WatchedRequest:
    """Stands in for drafter, verifier and rule of one request."""

    def __init__(
        self, stopwatch: Stopwatch, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> None:
        self._stopwatch = stopwatch
        self._drafter = drafter
        self._verifier = verifier
        self._accept = accept
        self._ended = 0.0
        self._round: dict[str, float] = {}
        self._proposed_before = False

    async def propose(self, completion: Completion) -> Proposal:
        started = time.perf_counter()
        self._round = {"wait": started - self._ended}
        proposal = await self._drafter.propose(completion)
        self._round["draft"] = time.perf_counter() - started
        return proposal

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        started = time.perf_counter()
        verification = await self._verifier.verify(completion, proposal)
        self._round["verify"] = time.perf_counter() - started
        return verification

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        started = time.perf_counter()
        acceptance = self._accept(proposal, verification)
        self._ended = time.perf_counter()
        self._round["sampling"] = self._ended - started
        self._note(len(proposal) > 0)
        return acceptance

    def _note(self, has_proposal: bool) -> None:
        # The first proposal waits until the draft has read the prompt, and says nothing about the others.
        if has_proposal and self._proposed_before:
            self._stopwatch.add(self._round)
        self._proposed_before |= has_proposal


class PhaseObserver(NoObserver):
    """Times the rounds of all requests of a coordinator."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()

    def begin(self, request_id: str, traceparent: str = "") -> _PhasedRequest:
        """Observe a request."""
        return _PhasedRequest(self.stopwatch)


class _PhasedRequest(NoObserver):
    """Times the rounds of one request."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._proposed_before = False

    def round_ended(self, result: RoundResult) -> None:
        if result.proposed and self._proposed_before:
            times = result.times
            phases = {"wait": times.wait, "draft": times.draft, "verify": times.verify}
            self._stopwatch.add(phases | {"sampling": times.sampling})
        self._proposed_before |= result.proposed > 0

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        # A draft that was late or lost would spoil the measurement: it is noted.
        self._stopwatch.add({name: 0.0})
