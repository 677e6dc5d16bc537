"""Predicts what a round makes and takes: expected tokens, and seconds times one measured ratio. Pure.

Tokens come from the acceptance by position (`GainModel`), seconds from the step profiles that services measure when
they have warmed up (`StepModel`), and the ratio is that of measured to predicted seconds (`CostModel`). The controller
and `tandem plan` predict by the same functions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tandem.model.types import StepProfile
from tandem_coordinator.stats.rounds import Mode
from tandem_coordinator.stats.speculation import MovingMedian

PRIOR_RATE = 0.6
"""Acceptance before any was measured: about that of a draft of the same family (demo pair 0.55 to 0.7)."""
PRIOR_WEIGHT = 8.0
"""Proposals that the prior counts as. In simulations 2 loses 1.5 % of the first 100 rounds by giving up too early."""
MEMORY = 300.0
"""Proposals that counts are halved to when there are twice as many: the standard error of a rate is then 3 %."""
PRIOR_MISSES = (0.7, 0.83, 0.83, 0.75, 0.72)
"""Before any was measured, the rates at which the outcome of a verification is not the likeliest one; nor the second;
nor among 4, 8 and 16, given each time that it was not among half as many: a 2.6 M draft of a 25.7 M target."""
OUTCOMES = tuple(1 << place for place in range(len(PRIOR_MISSES)))
"""Numbers of outcomes that a draft may work ahead for."""
RATIO_MEMORY = 32
"""Rounds that a ratio is the median of: with noise of 30 % its standard error is 7 %."""
USUAL_DRAFT_STEP = 0.2
"""Step of a draft by a step of its target, before either is known."""


# ---- expected tokens


class ConditionalRates:
    """Rates of a chain of events, each given that all before it happened: means of Beta distributions that forget.

    For acceptance, the events are the proposed tokens, each accepted if all before it were.
    """

    def __init__(self, prior: Sequence[float] = (PRIOR_RATE,)) -> None:
        """
        Args:
            prior: Rates before anything was counted. Behind the last of them it is the rate of the event before.
        """
        self._prior = prior
        self._reached: list[float] = []
        self._happened: list[float] = []

    def add(self, length: int, happened: int) -> None:
        """Count a chain of so many events, of which the first ones happened and the next one did not."""
        missing = length - len(self._reached)
        self._reached += [0.0] * missing
        self._happened += [0.0] * missing
        for index in range(min(happened + 1, length)):
            self._reached[index] += 1.0
            self._happened[index] += index < happened
        if self._reached and self._reached[0] > 2.0 * MEMORY:
            self._reached = [count / 2.0 for count in self._reached]
            self._happened = [count / 2.0 for count in self._happened]

    def rates(self, count: int, deviations: float = 0.0) -> list[float]:
        """The first `count` rates, or what they may be at best: so many standard deviations higher."""
        rate = 0.0
        rates = []
        for index in range(count):
            weight = PRIOR_WEIGHT
            if index < len(self._prior):
                rate = self._prior[index]
            if index < len(self._reached):
                weight += self._reached[index]
                rate = (self._happened[index] + PRIOR_WEIGHT * rate) / weight
            deviation = math.sqrt(rate * (1.0 - rate) / (1.0 + weight))
            rates.append(min(rate + deviations * deviation, 1.0))
        return rates


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a round, the target's own included, for proposals of 0, 1, ..., len(rates) tokens.

    1 + E[accepted(K)], where a token counts when all before it were accepted (Leviathan et al. 2023, arXiv 2211.17192,
    equation 1, with a rate for each position).
    """
    product = 1.0
    tokens = [1.0]
    for rate in rates:
        product *= rate
        tokens.append(tokens[-1] + product)
    return tokens


class GainModel:
    """Learns what rounds of one kind of request yield: accepted tokens, and outcomes that were drafted for."""

    def __init__(self) -> None:
        self.acceptance = ConditionalRates()
        self._misses = ConditionalRates(PRIOR_MISSES)

    def add_outcome(self, rank: int | None, outcomes: int) -> None:
        """Count a round: the place of the outcome that came, None for a miss, among those that were drafted for."""
        tried = outcomes.bit_length()
        place = tried if rank is None else rank.bit_length()
        self._misses.add(tried if rank is None else max(tried, place + 1), place)

    def hit_rate(self, outcomes: int) -> float:
        """Share of rounds whose outcome is among so many."""
        return 1.0 - math.prod(self._misses.rates(outcomes.bit_length()))


# ---- predicted seconds


class StepModel:
    """Seconds of a service's step, interpolated between the sizes of its profile, and continued beyond them."""

    def __init__(self, profile: StepProfile) -> None:
        known = profile.seconds
        self.predict = lru_cache(4096)(self._predict)
        """Seconds of a step of so many sequences with so many tokens each."""
        fewest = min(sequences for sequences, _ in known)
        self._known = known
        self._tokens = sorted(tokens for sequences, tokens in known if sequences == fewest)
        # Large sizes may be missing: those of too few points are predicted from the smaller ones.
        self._sequences = sorted(
            sequences
            for sequences in {sequences for sequences, _ in known}
            if all((sequences, tokens) in known for tokens in self._tokens)
        )

    def _predict(self, sequences: float, tokens: int) -> float:
        few, many, share = _interval(self._sequences, sequences)
        short, long, part = _interval(self._tokens, tokens)
        known = self._known
        of_few = known[few, short] + part * (known[few, long] - known[few, short])
        of_many = known[many, short] + part * (known[many, long] - known[many, short])
        # Beyond the points a falling line would end below 0.
        return max(of_few + share * (of_many - of_few), 0.1 * known[few, short])


def _interval(points: Sequence[int], value: float) -> tuple[int, int, float]:
    """The two points around a value, or nearest to it, and where it lies between them."""
    if len(points) == 1:
        return points[0], points[0], 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    low = points[index]
    high = points[index + 1]
    return low, high, (value - low) / (high - low)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of the steps and questions that rounds consist of, at one load."""

    verify: Sequence[float]
    """The target's step in which each sequence has 0, 1, ... proposed tokens."""
    draft: float
    """One step of the draft."""
    target_question: float
    """The way to the target and back."""
    draft_question: float
    leads: bool = False
    """True if the target, left alone, begins the next round before it is asked."""
    leads_proposals: bool = False
    """True if it also begins a round whose proposal is there in time."""
    has_head: bool = False
    """True if its own head proposes, in the step that verifies."""

    def predict_asked(self) -> list[float]:
        """Seconds of a round that asks the draft for 0, 1, ... tokens; for 0 the target works alone."""
        alone = 0.0 if self.leads else self.target_question
        questions = alone if self.has_head else self.target_question + self.draft_question
        seconds = [verify + count * self.draft + questions for count, verify in enumerate(self.verify)]
        seconds[0] = self.verify[0] + alone
        return seconds

    def predict_hits(self, branch_step: float) -> list[float]:
        """Seconds of a round whose 0, 1, ... proposed tokens were drafted ahead: a verification, or the draft's steps
        where those take longer.

        Args:
            branch_step: Seconds of the draft's step for all outcomes that it works ahead for.
        """
        seconds = []
        for count, verify in enumerate(self.verify):
            # When the draft learns which outcome came, it is amid a step for others.
            drafting = 0.5 * self.draft + count * branch_step
            # What it drafts must have come before the verification ends.
            way = 0.5 * (self.draft_question + self.target_question)
            is_begun = self.leads_proposals and drafting + way <= verify
            seconds.append(max(verify, drafting) + (0.0 if is_begun else self.target_question))
        return seconds


class ServiceSpeed:
    """The speed of a target or a draft, by its own report."""

    def __init__(self, profile: StepProfile | None = None, question: float = 0.0) -> None:
        self.question = question
        """Seconds of the way there and back."""
        self.version = -1
        """Version of the profile."""
        self.steps: StepModel | None = None
        """None without a profile."""
        if profile is not None:
            self.renew(profile)

    def renew(self, profile: StepProfile) -> None:
        self.version = profile.version
        self.steps = StepModel(profile) if profile.seconds else None


class CostModel:
    """Predicts rounds of a target with a draft, and measures how much longer they take.

    Measured ratios are medians, so that a pause of the machine decides nothing. The ratio that was expected counts as
    that of the first round. A load, or a number of outcomes, that was not measured has the nearest one's.
    """

    def __init__(self, target: ServiceSpeed, draft: ServiceSpeed) -> None:
        self._target = target
        self._draft = draft
        self._ratios: dict[Mode, dict[int, MovingMedian]] = {mode: {} for mode in Mode}
        """Measured by predicted seconds of rounds, by load."""
        self._branch_ratios = {1: MovingMedian(RATIO_MEMORY, [1.0])}
        """The same of the draft's step, by the number of outcomes that it works ahead for."""

    @property
    def is_profiled(self) -> bool:
        return self._target.steps is not None and self._draft.steps is not None

    @property
    def is_known(self) -> bool:
        """True if predictions are in seconds: something tells how long a step takes."""
        return self.is_profiled or any(self._ratios.values())

    def is_known_of(self, mode: Mode) -> bool:
        """True if a prediction of such rounds rests on more than a guess."""
        return self.is_profiled or bool(self._ratios[mode])

    def predict_steps(self, load: int, max_tokens: int) -> StepSeconds:
        """The steps of rounds at a load, of a target that is asked for each. Where one service reports no profile they
        are in steps of the target's."""
        counts = range(max_tokens + 1)
        verify = [1.0 for _ in counts]
        draft = USUAL_DRAFT_STEP
        questions = 0.0, 0.0
        if self._target.steps is not None and self._draft.steps is not None:
            verify = [self._target.steps.predict(load, count + 1) for count in counts]
            draft = self._draft.steps.predict(load, 1)
            questions = self._target.question, self._draft.question
        return StepSeconds(verify, draft, *questions)

    def predict_branch_step(self, load: int, outcomes: int) -> float:
        """Seconds of the draft's step for so many outcomes of each request."""
        if self._draft.steps is None or not self.is_profiled:
            return USUAL_DRAFT_STEP
        return self._draft.steps.predict(load, outcomes) * (_nearest(self._branch_ratios, outcomes) or 1.0)

    def ratio(self, mode: Mode, load: int) -> float:
        """Measured by predicted seconds of rounds. Without profiles, other modes tell how long a step takes."""
        measured = _nearest(self._ratios[mode], load)
        if measured is None and not self.is_profiled:
            # Those with a draft are most alike.
            others = [_nearest(self._ratios[other], load) for other in reversed(Mode)]
            measured = next((ratio for ratio in others if ratio is not None), None)
        return 1.0 if measured is None else measured

    def add_round(self, mode: Mode, load: int, seconds: float, predicted: float) -> None:
        """Count a round of one of `load` requests, which report the same steps."""
        ratios = self._ratios[mode]
        if load not in ratios:
            expected = [self.ratio(mode, load)] * load if self.is_known else []
            ratios[load] = MovingMedian(RATIO_MEMORY * load, expected)
        ratios[load].add(seconds / predicted)

    def add_branch_step(self, load: int, outcomes: int, seconds: float) -> None:
        """Count a step of the draft for so many outcomes of each request."""
        if not self.is_profiled:
            return
        ratios = self._branch_ratios
        expected = _nearest(ratios, outcomes) or 1.0
        predicted = self.predict_branch_step(load, outcomes)
        if outcomes not in ratios:
            ratios[outcomes] = MovingMedian(RATIO_MEMORY * load, [expected] * load)
        ratios[outcomes].add(expected * seconds / predicted)


def _nearest(measured: dict[int, MovingMedian], size: int) -> float | None:
    """The ratio at a size, or at the nearest one that was measured; None where none was."""
    if size not in measured:
        size = min(measured, key=lambda other: abs(math.log(other / size)), default=size)
    return measured[size].value if size in measured else None
