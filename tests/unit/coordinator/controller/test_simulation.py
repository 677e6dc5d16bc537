"""The controller against an oracle, over random machines and drafts. Seeds are fixed; no clock is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product, starmap
from random import Random
from statistics import fmean, median

import pytest

from tandem.model.types import ModelInfo, StepCost, StepProfile
from tandem_coordinator.controller import (
    TRIAL_SHARE,
    RequestController,
    SpeculationController,
    Terms,
    request_kind,
)
from tandem_coordinator.prediction import expected_tokens
from tandem_coordinator.stats.rounds import RoundCost, RoundEnded, RoundPlan
from tests.unit.coordinator.ended_rounds import round_ended

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
    queue: float = 0.0
    """Steps of others that a request with a proposal waits for, where there are others."""
    wakings: float = 1.0
    """A request takes as many times as long as a health check."""

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
            queue=random.choice((0.0, 0.25, 0.5, 1.0)),
            wakings=random.choice((1.0, 2.0, 4.0)),
        )

    def verify_seconds(self, sequences: int, tokens: int) -> float:
        return self.verify + self.verify_sequence * sequences + self.verify_token * tokens

    def draft_seconds(self, sequences: int, steps: int) -> float:
        return steps * (self.draft + self.draft_sequence * sequences) if sequences else 0.0

    def message_seconds(self, sequences: int, is_drafted: bool) -> float:
        queue = (
            self.queue * self.verify_seconds(sequences, sequences) if sequences > 1 and is_drafted else 0.0
        )
        return queue + (2 if is_drafted else 1) * (self.message + self.message_sequence * sequences)

    def rates(self) -> list[float]:
        return [self.acceptance * self.decay**position for position in range(MAX_TOKENS)]

    def speed(self, load: int, proposed: int) -> float:
        """Return the expected tokens per second of each of `load` requests at this proposal length, without noise."""
        product = 1.0
        tokens = 1.0
        for rate in self.rates()[:proposed]:
            product *= rate
            tokens += product
        seconds = self.verify_seconds(load, load * (proposed + 1)) + self.draft_seconds(load, proposed)
        return tokens / (seconds + self.message_seconds(load, proposed > 0))

    def best_tokens(self, load: int) -> int:
        return max(range(MAX_TOKENS + 1), key=lambda proposed: self.speed(load, proposed))


@dataclass(frozen=True)
class Oracle:
    """Chooses with knowledge of the true costs and acceptance."""

    best_tokens: Callable[[int], int]

    def begin_round(self, load: int) -> RoundPlan:
        return RoundPlan(self.best_tokens(load))

    def round_ended(self, result: RoundEnded) -> None:
        """Nothing to learn."""


Speculation = RequestController | Oracle


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
        made = 0
        passed = 0.0
        for _ in range(steps):
            while len(self.requests) < load:
                ease = min(max(self._random.gauss(1.0, 0.1), 0.7), 1.3)
                self.requests.append(Request(self._begin(), ease, self._random.randint(*REQUEST_TOKENS)))
            tokens, seconds = self._step(load)
            made += tokens
            passed += seconds
        return made, passed

    def _noise(self) -> float:
        """Draw the noise of a step's time: a spread, and now and then a pause of the machine."""
        slow = self._times.choice((3.0, 10.0)) if self._times.random() < 0.01 else 1.0
        return slow * self._times.lognormvariate(-(self.profile.noise**2) / 2, self.profile.noise)

    def _step(self, load: int) -> tuple[int, float]:
        """One round of every request."""
        profile = self.profile
        requests = self.requests
        counts = [request.speculation.begin_round(load).tokens for request in requests]
        # The draft reads the prompt in the first round, and proposes nothing.
        proposed = [
            0 if request.is_first else min(count, request.tokens_left - 1)
            for request, count in zip(requests, counts, strict=True)
        ]
        drafting = sum(map(bool, proposed))
        longest = max(proposed)
        tokens = load + sum(proposed)
        verify = profile.verify_seconds(load, tokens) * self._noise()
        draft = profile.draft_seconds(drafting, longest) * self._noise()
        seconds = verify + draft + profile.message_seconds(load, drafting > 0) * self._noise()
        made = 0
        for request, count in zip(requests, proposed, strict=True):
            accepted = self._accepted(request, count)
            if not request.is_first:
                own = draft * count / max(longest, 1)
                cost = RoundCost(count, seconds, verify, load, tokens, own, max(drafting, 1))
                request.speculation.round_ended(round_ended(count, accepted, cost))
                self.lengths.setdefault(load, [0] * (MAX_TOKENS + 1))[count] += 1
            request.is_first = False
            request.tokens_left -= accepted + 1
            made += accepted + 1
        self.requests = [request for request in requests if request.tokens_left > 0]
        return made, seconds

    def _accepted(self, request: Request, proposed: int) -> int:
        for position in range(proposed):
            if self._random.random() >= min(self._rates[position] * request.ease, 0.99):
                return position
        return proposed


PROFILED_SEQUENCES = (1, 2, 4, 8, 16, 32)
PROFILED_TOKENS = (1, 3, 5, 9)


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
    draft = StepProfile(
        {
            (load, tokens): measured(profile.draft_seconds(load, 1))
            for load in PROFILED_SEQUENCES
            for tokens in PROFILED_TOKENS
        }
    )
    controller = SpeculationController()
    for name, steps in (("target", target), ("draft", draft)):
        model = ModelInfo(name, "", 10, "", 100, "", step_profile=steps)
        controller.introduce(
            name, model, measured(profile.message_seconds(1, is_drafted=False) / profile.wakings)
        )
    return controller


def begin_request(controller: SpeculationController, terms: Terms) -> RequestController:
    return controller.request(terms, "target")


def adaptive(controller: SpeculationController) -> Callable[[], Speculation]:
    """Begins requests that the controller decides for."""

    def begin() -> Speculation:
        return begin_request(controller, Terms(request_kind("draft", "residual", 1.0), MAX_TOKENS))

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


PROFILES = 40
STAGES = 4
ROUNDS = 320
"""Mean over all requests, in each stage of load."""
COSTLY = Profile(0.006, 0.0, 0.0006, 0.003, 0.0001, 0.0003, 0.0, 0.2, 1.0, 0.1)
"""A token costs a tenth of a step, a draft step half of one, and one token in five is accepted."""
CHEAP = Profile(0.02, 0.0, 0.0001, 0.001, 0.0, 0.0005, 0.0, 0.85, 1.0, 0.1)
"""The machine is bound by memory, and the draft is good."""


@pytest.mark.parametrize(("noise", "least"), [(None, 0.97), (0.3, 0.952)])
def test_the_controller_makes_nearly_as_many_tokens_as_an_oracle(noise: float | None, least: float) -> None:
    """From the first round, over loads that jump; with noise of 5 to 30 % of a step, and of 30 %."""
    random = Random(22)
    shares = []
    for number in range(PROFILES):
        profile = Profile.drawn(random)
        profile = profile if noise is None else replace(profile, noise=noise)
        stages = [random.choice(LOADS) for _ in range(STAGES)]
        begin = adaptive(controller_of(profile, number))
        shares.append(efficiency(profile, number, stages, ROUNDS, begin)[0])
    shares.sort()
    assert fmean(shares) >= least
    assert shares[PROFILES // 4] >= 0.94, "three profiles in four"
    assert shares[PROFILES // 20] >= 0.88, "all but one in twenty"
    assert shares[0] >= 0.8


@pytest.mark.parametrize(("load", "least"), [(1, 0.95), (4, 0.964), (16, 0.958)])
def test_the_first_rounds_make_nearly_as_much(load: int, least: float) -> None:
    """A hundred rounds of each request: what is left to lose is learning that a draft is useless."""
    random = Random(22)
    shares = []
    for number in range(PROFILES):
        profile = Profile.drawn(random)
        begin = adaptive(controller_of(profile, number))
        shares.append(efficiency(profile, number, [load], 100 * load, begin)[0])
    assert fmean(shares) >= least


HITS = {1: 0.35, 2: 0.5, 4: 0.62, 8: 0.75, 16: 0.85}
"""Share of rounds whose outcome is among as many: a good draft's."""
AHEAD_ROUNDS = 40, 300


def _ahead_seconds(profile: Profile, tokens: int, is_hit: bool, contention: float, branches: float) -> float:
    """Seconds of a round at batch 1 that the draft worked ahead of, with steps that take so many times as long."""
    verify = profile.verify_seconds(1, tokens + 1) * contention
    draft = profile.draft_seconds(1, 1) * contention
    if is_hit:
        hidden = (1 + tokens * branches) * draft
        return max(verify, hidden) + profile.message_seconds(1, is_drafted=False)
    return verify + tokens * draft + profile.message_seconds(1, is_drafted=True)


def _ahead_efficiencies(profile: Profile, contention: float, branch: float, seed: int) -> list[float]:
    """After `AHEAD_ROUNDS`: a request's tokens by those of the best fixed choice, with drafting ahead or without.

    A step for more outcomes takes longer by a share `branch` for each, which the draft's profile does not say.
    """
    rates = profile.rates()
    expected = expected_tokens(rates)

    def ahead(tokens: int, outcomes: int, is_hit: bool) -> float:
        return _ahead_seconds(profile, tokens, is_hit, contention, 1.0 + branch * (outcomes - 1))

    def speed(tokens: int, outcomes: int) -> float:
        hit, miss = (ahead(tokens, outcomes, is_hit) for is_hit in (True, False))
        return expected[tokens] / (HITS[outcomes] * hit + (1.0 - HITS[outcomes]) * miss)

    lengths = range(1, MAX_TOKENS + 1)
    best = max(
        *(profile.speed(1, tokens) for tokens in (0, *lengths)), *starmap(speed, product(lengths, HITS))
    )
    controller = controller_of(profile, seed)
    random = Random(seed)
    terms = Terms(request_kind("draft", "strict", 1.0), MAX_TOKENS, draft_ahead="auto")
    request = begin_request(controller, terms)
    made = 0.0
    passed = 0.0
    awaited = 0
    found = []
    for number in range(1, AHEAD_ROUNDS[-1] + 1):
        plan = request.begin_round(1)
        tokens = plan.tokens
        noise = random.lognormvariate(-(profile.noise**2) / 2, profile.noise)
        accepted = 0
        while accepted < tokens and random.random() < rates[accepted]:
            accepted += 1
        if awaited and tokens:
            chance = random.random()
            rank = next((count - 1 for count, share in HITS.items() if chance < share), None)
            rank = None if rank is None or rank >= awaited else rank
            step_seconds = profile.draft_seconds(1, 1) * contention * (1.0 + branch * (awaited - 1)) * noise
            step = StepCost(step_seconds, 1, awaited)
            seconds = ahead(tokens, awaited, rank is not None) * noise
        else:
            rank = None
            step = None
            seconds = profile.verify_seconds(1, tokens + 1) + profile.draft_seconds(1, tokens)
            seconds = (seconds + profile.message_seconds(1, tokens > 0)) * noise
        verify = profile.verify_seconds(1, tokens + 1) * noise
        draft = profile.draft_seconds(1, tokens) * noise
        cost = RoundCost(tokens, seconds, verify, 1, tokens + 1, draft if rank is None else 0.0, 1)
        was_awaited = awaited > 0 and tokens > 0
        request.round_ended(
            round_ended(tokens, accepted, cost, awaited=was_awaited, rank=rank, outcome_step=step)
        )
        made += expected[tokens]
        passed += seconds
        awaited = plan.outcomes
        if number in AHEAD_ROUNDS:
            found.append(made / passed / best)
    return found


@pytest.mark.parametrize(
    ("contention", "branch", "soon", "later"),
    [(1.0, 0.0, 0.95, 0.957), (2.0, 0.0, 0.887, 0.95), (1.0, 0.2, 0.9, 0.94)],
)
def test_drafting_ahead_is_chosen_where_it_pays(
    contention: float, branch: float, soon: float, later: float
) -> None:
    """From the first round; where draft and target share a machine, it is given up as soon as that shows, and where
    outcomes take longer than the profile says, there are fewer of them."""
    random = Random(5)
    found = [_ahead_efficiencies(Profile.drawn(random), contention, branch, seed) for seed in range(PROFILES)]
    for shares, least in zip(map(sorted, zip(*found, strict=True)), (soon, later), strict=True):
        assert fmean(shares) >= least
        assert shares[PROFILES // 20] >= least - 0.17


def test_a_pause_in_a_drafts_first_step_does_not_stop_speculation_for_good() -> None:
    controller = SpeculationController()
    request = adaptive(controller)()
    for number in range(400):
        proposed = request.begin_round(1).tokens
        draft = CHEAP.draft_seconds(1, proposed) * (12.0 if number == 0 else 1.0)
        verify = CHEAP.verify_seconds(1, proposed + 1)
        seconds = verify + draft + CHEAP.message_seconds(1, proposed > 0)
        cost = RoundCost(proposed, seconds, verify, 1, proposed + 1, draft, 1)
        request.round_ended(round_ended(proposed, min(proposed, 3), cost))
    assert request.begin_round(1).tokens >= 3


def test_a_draft_without_gain_is_tried_in_few_rounds() -> None:
    for load in (1, 4, 16):
        _, cluster = efficiency(COSTLY, load, [load], 3000, adaptive(controller_of(COSTLY)))
        lengths = cluster.lengths[load]
        assert sum(lengths[1:]) <= 0.03 * sum(lengths)


def test_a_draft_with_gain_is_left_out_in_few_rounds() -> None:
    for load in (1, 4, 16):
        share, cluster = efficiency(CHEAP, load, [load], 2000, adaptive(SpeculationController()))
        lengths = cluster.lengths[load]
        assert lengths[0] <= 8 * TRIAL_SHARE * sum(lengths), "trials, and first rounds of requests"
        assert share >= 0.93


class SharedMachine(Profile):
    """A machine whose target is slower while a draft runs beside it, as it did when the profile was measured."""

    def verify_seconds(self, sequences: int, tokens: int) -> float:
        return super().verify_seconds(sequences, tokens) * (0.5 if tokens == sequences else 1.0)


@pytest.mark.parametrize("load", [1, 4])
def test_a_target_that_is_faster_alone_than_its_profile_says_is_left_alone(load: int) -> None:
    profile = replace(CHEAP, acceptance=0.5, draft=0.2 * CHEAP.verify)
    controller = controller_of(profile)
    machine = SharedMachine(**asdict(profile))
    assert profile.best_tokens(load) > 0
    assert machine.best_tokens(load) == 0
    _, cluster = efficiency(machine, load, [load], 3000, adaptive(controller))
    cluster.lengths.clear()
    cluster.run(load, 1000)
    lengths = cluster.lengths[load]
    assert lengths[0] > 0.9 * sum(lengths)


def test_new_requests_start_with_the_measurements_of_others() -> None:
    """The choice for the first round after fifty requests, beside an oracle's."""
    for profile in (COSTLY, CHEAP):
        controller = SpeculationController()
        efficiency(profile, 1, [1], 3000, adaptive(controller))
        best = profile.best_tokens(1)
        first = begin_request(controller, Terms(request_kind("draft", "residual", 1.0), MAX_TOKENS))
        first.begin_round(1)
        assert first.decision is not None
        assert abs(first.decision.plan.tokens - best) <= (2 if best else 0)


def test_the_controller_detects_changes() -> None:
    for before, after in ((CHEAP, COSTLY), (COSTLY, CHEAP)):
        begin = adaptive(SpeculationController())
        Cluster(before, 1, begin).run(4, 600)
        cluster = Cluster(after, 2, begin)
        cluster.run(4, 1000)
        cluster.lengths.clear()
        cluster.run(4, 400)
        lengths = cluster.lengths[4]
        assert (lengths[0] > 0.9 * sum(lengths)) == (after is COSTLY)


class CrowdedMachine(Profile):
    """A machine whose verifications of proposals take twice what they took when the profile was measured."""

    def verify_seconds(self, sequences: int, tokens: int) -> float:
        return super().verify_seconds(sequences, tokens) * (1.0 if tokens == sequences else 2.0)


@pytest.mark.parametrize(("load", "share"), [(4, 0.95), (16, 0.955)])
def test_a_draft_that_slows_its_target_down_is_soon_left(load: int, share: float) -> None:
    """Of the first 100 rounds."""
    profile = replace(CHEAP, acceptance=0.5, draft=0.2 * CHEAP.verify)
    machine = CrowdedMachine(**asdict(profile))
    assert profile.best_tokens(load) > 0
    assert machine.best_tokens(load) == 0
    shares = [
        efficiency(machine, seed, [load], 100 * load, adaptive(controller_of(profile)))[0]
        for seed in range(6)
    ]
    assert fmean(shares) > share


# ---- services that report no profile

STEP_SECONDS = 0.005
"""Of either service."""
QUESTION_SECONDS = 0.0011, 0.0005
"""To the target, and to the draft."""


def unprofiled_lengths(seed: int, rounds: int, paused: int = 0) -> list[int]:
    """Proposal lengths of a request whose target accepts everything, on services with steps of 5 ms.

    Args:
        paused: Number of the round, among those with a proposal and among those without, that takes 100 ms longer.
    """
    random = Random(seed)
    request = begin_request(SpeculationController(), Terms(request_kind("draft", "residual", 1.0), 2))
    lengths: list[int] = []
    seen = {True: 0, False: 0}
    for number in range(rounds):
        tokens = request.begin_round(1).tokens
        proposed = tokens if number else 0  # the draft reads the prompt in the first round
        verify = STEP_SECONDS * random.lognormvariate(0.0, 0.1)
        draft = proposed * STEP_SECONDS * random.lognormvariate(0.0, 0.1)
        questions = sum(QUESTION_SECONDS[: 1 + (proposed > 0)]) * random.lognormvariate(0.0, 0.3)
        seconds = verify + draft + questions
        if number:
            seen[proposed > 0] += 1
            seconds += 0.1 * (seen[proposed > 0] == paused)
        cost = RoundCost(proposed, seconds, verify, 1, 1 + proposed, draft, 1)
        request.round_ended(round_ended(proposed, proposed, cost if number else None))
        lengths.append(tokens)
    return lengths


def test_fresh_starts_on_services_without_profiles_agree() -> None:
    """Two tokens make 181 tokens/s here, and the target alone 164."""
    for seed in range(20):
        lengths = unprofiled_lengths(seed, 400)
        drafted = sum(length > 0 for length in lengths[-200:])
        assert drafted > 150, f"seed {seed}"


@pytest.mark.parametrize("paused", range(1, 6))
def test_a_pause_in_one_of_the_first_rounds_of_a_mode_does_not_stop_drafting(paused: int) -> None:
    """It falls into that round with a proposal, and into that round without one."""
    for seed in range(20):
        lengths = unprofiled_lengths(seed, 400, paused)
        without = 0
        for length in lengths:
            without = 0 if length else without + 1
            assert without <= 30, f"seed {seed}"
