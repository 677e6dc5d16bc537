"""Where a round's time goes: stopwatches around the three things that a round calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from coordinator.completion import Completion
from coordinator.generate import AcceptanceRule, Drafter, Verifier
from coordinator.observer import EventValue, NoObserver
from tandem.types import Acceptance, Proposal, Verification


class Stopwatch:
    """Seconds of each round that had a proposal, by phase; of each request the first such round is left out.

    `wait` is what lies between an acceptance and the next proposal: committing, text, and handing the piece on.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def watch(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> tuple[Drafter, Verifier, AcceptanceRule]:
        """The same three, timed. For one request; any number of them may share the stopwatch."""
        watched = _WatchedRequest(self, drafter, verifier, accept)
        return watched, watched, watched.accept


class _WatchedRequest:
    """Stands in for drafter, verifier and rule of one request."""

    def __init__(
        self, stopwatch: Stopwatch, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> None:
        self._seconds = stopwatch.seconds
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
        # The first proposal waits for the draft to have read the prompt, which tells nothing of the rest.
        if has_proposal and self._proposed_before:
            for phase, seconds in self._round.items():
                self._seconds[phase].append(seconds)
        self._proposed_before |= has_proposal


class PhaseObserver(NoObserver):
    """Times the rounds of all requests of a coordinator."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()

    def begin(self, request_id: str, traceparent: str = "") -> PhaseObserver:
        """Itself: requests share the stopwatch."""
        return self

    def observing(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> tuple[Drafter, Verifier, AcceptanceRule]:
        """The same three, timed."""
        return self.stopwatch.watch(drafter, verifier, accept)

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """A draft that was late or lost would spoil the figures."""
        self.stopwatch.seconds[name].append(0.0)
