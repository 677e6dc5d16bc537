"""A cluster in simulated time: a draft, a target and requests, with costs and acceptance drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import median
from typing import Protocol

from coordinator.speculation.controller import SpeculationController
from coordinator.speculation.gains import request_kind
from coordinator.stats.rounds import RoundCost, RoundResult
from tandem.types import ModelInfo, StepProfile
from tests.unit.coordinator.round_results import round_result

MAX_TOKENS = 6
LOADS = (1, 2, 4, 8, 16)
REQUEST_TOKENS = 48, 256
"""Shortest and longest completion."""


@dataclass(frozen=True)
class Profile:
    """Costs and acceptance of rounds, in seconds and probabilities."""

    verify: float
    """Seconds of a step of the target, without its sequences and tokens."""
    verify_sequence: float
    verify_token: float
    draft: float
    """Seconds of a step of the draft."""
    draft_sequence: float
    message: float
    """Seconds of a request to one service and its answer."""
    message_sequence: float
    acceptance: float
    """Acceptance of the first proposed token."""
    decay: float
    """Acceptance of each later position, relative to the previous one."""
    noise: float
    """Standard deviation of a step's logarithm."""

    @staticmethod
    def drawn(random: Random) -> Profile:
        """Draw a machine that is bound by memory, computation or messages, and a draft of any quality."""
        verify = 10.0 ** random.uniform(-2.7, -1.3)
        return Profile(
            verify=verify,
            verify_sequence=verify * random.choice((0.0, 0.01, 0.1, 0.5)),
            verify_token=verify * random.choice((0.0, 0.01, 0.05, 0.2, 0.5)),
            draft=verify * random.choice((0.02, 0.05, 0.1, 0.2, 0.5)),
            draft_sequence=verify * random.choice((0.0, 0.002, 0.02, 0.1)),
            message=verify * random.choice((0.01, 0.05, 0.2)),
            message_sequence=verify * random.choice((0.0, 0.005, 0.02)),
            acceptance=random.uniform(0.02, 0.97),
            decay=random.choice((0.9, 0.97, 1.0)),
            noise=random.choice((0.05, 0.15, 0.3)),
        )

    def verify_seconds(self, sequences: int, tokens: int) -> float:
        """Return the seconds of one step of the target."""
        return self.verify + self.verify_sequence * sequences + self.verify_token * tokens

    def draft_seconds(self, sequences: int, steps: int) -> float:
        """Return the seconds of the steps of a proposal."""
        return steps * (self.draft + self.draft_sequence * sequences) if sequences else 0.0

    def message_seconds(self, sequences: int, is_drafted: bool) -> float:
        """Return the seconds of the messages of a round."""
        return (2 if is_drafted else 1) * (self.message + self.message_sequence * sequences)

    def rates(self) -> list[float]:
        """Return the conditional acceptance by position."""
        return [self.acceptance * self.decay**position for position in range(MAX_TOKENS)]

    def speed(self, load: int, proposed: int) -> float:
        """Return the expected tokens per second of each of `load` requests at this proposal length, without noise."""
        product, tokens = 1.0, 1.0
        for rate in self.rates()[:proposed]:
            product *= rate
            tokens += product
        seconds = self.verify_seconds(load, load * (proposed + 1)) + self.draft_seconds(load, proposed)
        return tokens / (seconds + self.message_seconds(load, proposed > 0))

    def best_tokens(self, load: int) -> int:
        """Return the number of tokens that an oracle proposes."""
        return max(range(MAX_TOKENS + 1), key=lambda proposed: self.speed(load, proposed))


class Speculation(Protocol):
    """The controller's part in a request, or an oracle's."""

    def begin_round(self, load: int) -> int:
        """Return the number of tokens to propose."""

    def end_round(self, result: RoundResult) -> None:
        """A round has ended."""

    def end(self) -> None:
        """The request has ended."""


@dataclass(frozen=True)
class Oracle:
    """Chooses with knowledge of the true costs and acceptance."""

    best_tokens: Callable[[int], int]

    def begin_round(self, load: int) -> int:
        """The best length at this load."""
        return self.best_tokens(load)

    def end_round(self, result: RoundResult) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to end."""


@dataclass
class Request:
    """A request, as far as the controller is concerned."""

    speculation: Speculation
    ease: float
    """Its acceptance relative to the common one."""
    tokens_left: int
    is_first: bool = True


class Cluster:
    """Runs the rounds of all requests in lockstep, as a batching engine does."""

    def __init__(self, profile: Profile, seed: int, begin: Callable[[], Speculation]) -> None:
        self.profile = profile
        self._begin = begin
        self._rates = profile.rates()
        self._times, self._random = Random(seed), Random(seed + 1)
        self.requests: list[Request] = []
        self.lengths: dict[int, list[int]] = {}
        """By load: how many rounds proposed 0, 1, ... tokens."""

    def run(self, load: int, steps: int) -> tuple[int, float]:
        """Run this many steps, and return their tokens and seconds."""
        del self.requests[load:]
        made, passed = 0, 0.0
        for _ in range(steps):
            while len(self.requests) < load:
                ease = min(max(self._random.gauss(1.0, 0.1), 0.7), 1.3)
                self.requests.append(Request(self._begin(), ease, self._random.randint(*REQUEST_TOKENS)))
            tokens, seconds = self._step(load)
            made, passed = made + tokens, passed + seconds
        return made, passed

    def _noise(self) -> float:
        """Draw the noise of a step's time: a spread, and now and then a pause of the machine."""
        slow = self._times.choice((3.0, 10.0)) if self._times.random() < 0.01 else 1.0
        return slow * self._times.lognormvariate(-(self.profile.noise**2) / 2, self.profile.noise)

    def _step(self, load: int) -> tuple[int, float]:
        """One round of every request."""
        profile, requests = self.profile, self.requests
        counts = [request.speculation.begin_round(load) for request in requests]
        # The draft reads the prompt in the first round, and proposes nothing.
        proposed = [
            0 if request.is_first else min(count, request.tokens_left - 1)
            for request, count in zip(requests, counts, strict=True)
        ]
        drafting, longest, tokens = sum(map(bool, proposed)), max(proposed), load + sum(proposed)
        verify = profile.verify_seconds(load, tokens) * self._noise()
        draft = profile.draft_seconds(drafting, longest) * self._noise()
        seconds = verify + draft + profile.message_seconds(load, drafting > 0) * self._noise()
        made = 0
        for request, count in zip(requests, proposed, strict=True):
            accepted = self._accepted(request, count)
            if not request.is_first:
                own = draft * count / max(longest, 1)
                cost = RoundCost(count, seconds, verify, load, tokens, own, max(drafting, 1))
                request.speculation.end_round(round_result(count, accepted, cost))
                self.lengths.setdefault(load, [0] * (MAX_TOKENS + 1))[count] += 1
            request.is_first = False
            request.tokens_left -= accepted + 1
            made += accepted + 1
            if request.tokens_left <= 0:
                request.speculation.end()
        self.requests = [request for request in requests if request.tokens_left > 0]
        return made, seconds

    def _accepted(self, request: Request, proposed: int) -> int:
        for position in range(proposed):
            if self._random.random() >= min(self._rates[position] * request.ease, 0.99):
                return position
        return proposed


PROFILED_SEQUENCES, PROFILED_TOKENS = (1, 2, 4, 8, 16, 32), (1, 3, 5, 9)


def controller_of(profile: Profile, seed: int = 0) -> SpeculationController:
    """A controller to which the services have reported what their steps take: medians of five steps with noise."""
    random = Random(seed)

    def measured(seconds: float) -> float:
        return seconds * median(random.lognormvariate(0.0, profile.noise) for _ in range(5))

    target = StepProfile(
        {
            (load, tokens): measured(profile.verify_seconds(load, load * tokens))
            for load in PROFILED_SEQUENCES
            for tokens in PROFILED_TOKENS
        }
    )
    draft = StepProfile({(load, 1): measured(profile.draft_seconds(load, 1)) for load in PROFILED_SEQUENCES})
    controller = SpeculationController()
    for name, steps in (("target", target), ("draft", draft)):
        model = ModelInfo(name, "", 10, "", 100, "", step_profile=steps)
        controller.introduce(name, model, measured(profile.message_seconds(1, is_drafted=False)))
    return controller


def adaptive(controller: SpeculationController) -> Callable[[], Speculation]:
    """Begins requests that the controller decides for."""

    def begin() -> Speculation:
        speculation = controller.request(request_kind("draft", "residual", 1.0), MAX_TOKENS)
        speculation.target = "target"
        return speculation

    return begin


def efficiency(
    profile: Profile, seed: int, stages: Sequence[int], rounds: int, begin: Callable[[], Speculation]
) -> tuple[float, Cluster]:
    """Return the tokens relative to an oracle's in the same time and with the same noise, over stages of load."""
    cluster = Cluster(profile, seed, begin)
    oracle = Cluster(profile, seed, lambda: Oracle(cache(profile.best_tokens)))
    made = possible = 0.0
    for load in stages:
        tokens, seconds = cluster.run(load, rounds // load)
        best, best_seconds = oracle.run(load, rounds // load)
        made += tokens
        possible += best / best_seconds * seconds
    return made / possible, cluster
