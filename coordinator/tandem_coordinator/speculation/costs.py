"""Cost model of a round: the step profiles of its services, the way to them, and the coordinator's own work.

    seconds(load, K) = verify(load, load * (K + 1)) + K * draft(load) + rest(load, way of working)

A service measures its profile when it has warmed up, so that costs are known before the first round, and nothing is
tried in order to learn them. The steps that it makes move its profile: the nearest point, and all of it by one slow
factor, as when other work comes to the machine. What a round takes beside them is learnt for each way of working.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from tandem.model.types import StepProfile
from tandem_coordinator.speculation.gains import WINDOW
from tandem_coordinator.stats.rounds import RoundCost

PROFILE_STEPS = 2.0
"""Steps that a point of a profile weighs as much as: what services do to each other shows only when they serve. Of an
oracle, with 30 % noise, 1 makes 0.968 in simulations, 2 0.976, 4 0.972, and 8 0.974."""
SURPRISE = 2.0
"""Factor beyond a prediction that counts as no more, because a pause of the machine is no cost."""
_USUAL_SHAPE = {(sequences, tokens): 1.0 for sequences in (1, 32) for tokens in (1, 9)}
"""Shape of a service that reports no profile: as of a GPU that spends its steps on reading weights."""

_UNKNOWN = StepProfile({}, version=-1)


class Way(Enum):
    """Ways of working, which differ in what a round takes beside its services' steps."""

    LED = auto()
    """The target alone, which began the round by itself."""
    ASKED = auto()
    """The target alone, which was asked for the round."""
    DRAFTED = auto()
    """The draft was asked for a proposal, then the target."""
    AHEAD = auto()
    """The draft worked ahead. The rest is what the prediction leaves out, for each expected token, since rounds propose
    what is ready: draft and target may share a machine, where the draft's steps slow down the verification that they
    hide behind."""
    MISSED = auto()
    """No round: the question to a draft that worked ahead for other outcomes than the one that came."""


class ServiceCosts:
    """Seconds of a service's step, by the sequences and tokens in it."""

    def __init__(self, profile: StepProfile = _UNKNOWN, trip_seconds: float = 0.0) -> None:
        """
        Args:
            profile: What the service measured, if it did.
            trip_seconds: The way there and back, by health checks.
        """
        self.trip_seconds = trip_seconds
        self.begin(profile)

    def begin(self, profile: StepProfile) -> None:
        """Begin with what the service measured, whatever was known before."""
        self.version = profile.version
        measured = profile.seconds
        self.is_known = bool(measured)
        """True if it has a profile, or a step was measured."""
        known = measured or _USUAL_SHAPE
        fewest = min(sequences for sequences, _ in known)
        self._tokens = sorted(tokens for sequences, tokens in known if sequences == fewest)
        # Large sizes may be missing: those of too few points are predicted from the smaller ones.
        self._sequences = sorted(
            sequences
            for sequences in {sequences for sequences, _ in known}
            if all((sequences, tokens) in known for tokens in self._tokens)
        )
        self._seconds = [[known[size, tokens] for tokens in self._tokens] for size in self._sequences]
        self._counts = [[PROFILE_STEPS if measured else 0.0] * len(self._tokens) for _ in self._sequences]
        """Steps that each size rests on."""
        self._factor = 1.0
        self._place = lru_cache(4096)(self._place_of)

    def seconds(self, sequences: int, tokens: int) -> float:
        """Predicted seconds of a step of so many sequences with so many tokens in all."""
        i, share, j, part = self._place(sequences, tokens)
        low, high = self._seconds[i], self._seconds[min(i + 1, len(self._seconds) - 1)]
        k = min(j + 1, len(self._tokens) - 1)
        first = low[j] + part * (low[k] - low[j])
        second = high[j] + part * (high[k] - high[j])
        # Beyond the points a falling line would end below 0.
        return self._factor * max(first + share * (second - first), 0.1 * low[0])

    def add(self, sequences: int, tokens: int, seconds: float, weight: float) -> None:
        """Count a step; `weight` is below 1 where several report the same."""
        predicted = self.seconds(sequences, tokens)
        if predicted <= 0.0:
            return
        ratio = seconds / predicted
        if not self.is_known:
            self.is_known, self._factor = True, self._factor * ratio
            return
        row, column = self._nearest(sequences, tokens)
        if tokens > sequences and not column and len(self._tokens) > 1:
            return  # a step in which few had a proposal tells neither of those without nor of those in which all have
        count = self._counts[row][column] = self._counts[row][column] + weight
        share = max(1.0 / WINDOW, 1.0 / (1.0 + count)) * weight
        change = share * (min(ratio, SURPRISE) - 1.0)
        # What slows a step of one token each may slow all steps: half of it counts for these. Those with proposals tell
        # of themselves alone: the draft of a shared machine slows them down, and not the target without it.
        if tokens <= sequences:
            change /= 2.0
            self._factor *= 1.0 + change
        points = self._seconds[row]
        measured = points[column] = points[column] * (1.0 + change)
        # No step takes longer than one of more tokens: what was measured of either may be old.
        points[:column] = [min(each, measured) for each in points[:column]]
        points[column:] = [max(each, measured) for each in points[column:]]

    def _nearest(self, sequences: int, tokens: int) -> tuple[int, int]:
        i, share, j, part = self._place(sequences, tokens)
        last_row, last_column = len(self._sequences) - 1, len(self._tokens) - 1
        # The target alone has points of its own: one proposed token lies halfway to the next.
        return min(i + (share > 0.5), last_row), min(j + (part >= 0.5), last_column)

    def _place_of(self, sequences: int, tokens: int) -> tuple[int, float, int, float]:
        """The interval of a step's sequences in the profile, the place in it, and the same of its tokens."""
        return *_interval(self._sequences, sequences), *_interval(self._tokens, tokens / sequences)


def _interval(points: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of a value among points, and where it lies in it."""
    if len(points) == 1:
        return 0, 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


@dataclass(slots=True)
class _Rest:
    """Time that rounds of one way of working take beside their services' steps."""

    weight: float
    """Rounds of all requests that it rests on."""
    seconds: float
    """Mean."""


class CostModel:
    """Predicts rounds on one target with one draft."""

    def __init__(self, target: ServiceCosts, draft: ServiceCosts, leads: bool = False) -> None:
        """
        Args:
            leads: True if the target, left alone, begins the next rounds before it is asked.
        """
        self.target = target
        self.draft = draft
        self.alone = Way.LED if leads else Way.ASKED
        """How rounds go without a draft."""
        self._rests: dict[Way, dict[int, _Rest]] = {way: {} for way in Way}
        """By way of working and load class."""

    @property
    def is_known(self) -> bool:
        """True if predictions have a level."""
        return self.target.is_known and self.draft.is_known

    def is_measured(self, way: Way) -> bool:
        """True if rounds of this way of working were measured."""
        return bool(self._rests[way])

    @property
    def trips_seconds(self) -> float:
        """The way to both services and back."""
        return self.target.trip_seconds + self.draft.trip_seconds

    def add(self, load: int, cost: RoundCost, *, is_settled: bool = True) -> None:
        """Count a round that did not draft ahead, with the sequences that shared the target.

        Args:
            load: So many requests.
            cost: What it cost.
            is_settled: False for the first round of its kind: the first that the target began by itself follows one
                that was asked for, and for the first proposal the draft read all that was committed before.
        """
        shared = cost.verify_sequences
        share = 1.0 / shared if cost.proposed else 1.0  # of the target alone one request at a time tells
        self.target.add(shared, cost.verify_tokens, cost.verify_seconds, share)
        way = Way.DRAFTED if cost.proposed else Way.LED if cost.was_led else Way.ASKED
        if not is_settled and way is not Way.ASKED:
            return
        if cost.proposed:
            drafting = max(cost.draft_sequences, 1)
            self.draft.add(drafting, drafting, cost.draft_seconds / cost.proposed, 1.0 / drafting)
        # A step in which others had a shorter proposal, or none, is waited for as well.
        # A led step that others' proposals lengthen says so, and an answer read late needs the early one after it.
        is_waited_for = cost.proposed and cost.verify_tokens <= shared * (cost.proposed + 1)
        if cost.is_uniform(load) or is_waited_for or (cost.was_led and cost.is_of_all(load)):
            # Below 0 where the target had the answer of a round that it led before the last one was read.
            self.add_rest(way, load, cost.seconds - cost.verify_seconds - cost.draft_seconds)

    def add_rest(self, way: Way, load: int, seconds: float) -> None:
        """Count what a round of one of so many requests took beside its steps, or beside what was predicted."""
        trip = self.target.trip_seconds
        trips = {Way.LED: trip, Way.ASKED: trip, Way.DRAFTED: self.trips_seconds}.get(way, 0.0)
        known = self._rests[way]
        if load_class(load) not in known:
            # The first rounds are cold: what was expected of them counts as much as one.
            known[load_class(load)] = _Rest(1.0, self.rest_seconds(way, load))
        rest = known[load_class(load)]
        share = 1.0 if way in (Way.LED, Way.ASKED) else 1.0 / load
        rest.weight = min(rest.weight + share, float(WINDOW))
        # Requests that wait for each other make long rounds common: only what is twice a surprise is a pause.
        limit = 2.0 * SURPRISE * max(rest.seconds, trips) or abs(seconds)
        if way is Way.LED:
            # An answer that was read late is followed by one that comes early: neither is what a round takes.
            limit = max(SURPRISE * rest.seconds, trips) or abs(seconds)
            seconds = max(seconds, -limit)
        elif way is Way.AHEAD:
            # Nor is a round shorter by more than a verification, whatever the draft says of its steps.
            verify = self.verify_seconds(load, 0)
            limit, seconds = verify * SURPRISE + max(rest.seconds, 0.0), max(seconds, -verify)
        rest.seconds += (min(seconds, limit) - rest.seconds) * share / rest.weight

    def rest_seconds(self, way: Way, load: int) -> float:
        """Predicted seconds of a round beside the services' steps."""
        if known := self._rests[way]:
            wanted = load_class(load)
            return known[min(known, key=lambda other: abs(other - wanted))].seconds
        if way is Way.MISSED:
            return max(self.rest_seconds(Way.DRAFTED, load) - self.rest_seconds(Way.ASKED, load), 0.0)
        if way not in (Way.ASKED, Way.DRAFTED):
            return 0.0
        is_drafted = way is Way.DRAFTED
        # A request with a proposal waits for the end of a step of others: half of one.
        queue = self.verify_seconds(load, 0) / 2.0 if is_drafted and load > 1 else 0.0
        # A proposal is one more question and answer.
        if others := self._rests[Way.ASKED if is_drafted else Way.DRAFTED].values():
            return (2.0 if is_drafted else 0.5) * min(rest.seconds for rest in others) + queue
        # A question wakes more than a health check does: the engine's thread, and the event loop for its answer.
        return 2.0 * (self.trips_seconds if is_drafted else self.target.trip_seconds) + queue

    def verify_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a verification in which each of `load` sequences has so many proposed tokens."""
        return self.target.seconds(load, load * (proposed + 1))

    def draft_seconds(self, load: int, outcomes: int = 1) -> float:
        """Predicted seconds of one step of the draft, for so many outcomes of each request: one more token for each."""
        return self.draft.seconds(load, load * outcomes)

    def seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round that does not draft ahead. The way to a target that leads costs nothing."""
        if proposed:
            drafting = proposed * self.draft_seconds(load)
            return self.verify_seconds(load, proposed) + drafting + self.rest_seconds(Way.DRAFTED, load)
        return self.verify_seconds(load, 0) + max(self.rest_seconds(self.alone, load), 0.0)

    def seconds_ahead(
        self, load: int, expected: Sequence[float], step: float, hit_rate: float, *, leads: bool = False
    ) -> float:
        """Predicted seconds in which rounds that draft ahead make `expected[-1]` tokens, without their rest.

        A hit costs a verification, or the draft's steps where these take longer; a miss costs a question to the draft
        as well.

        Args:
            expected: Expected tokens of a round with a proposal of 0, 1, ... tokens; rounds propose the most of them.
            step: Seconds of the draft's step for all outcomes that it drafts for.
            hit_rate: Share of rounds whose outcome is among them.
            leads: True if the target begins rounds with the proposals that are drafted ahead for it.
        """
        tokens = len(expected) - 1
        verify, step = self.verify_seconds(load, tokens), max(step, 1e-9)
        # When the draft learns which outcome came, it is amid a step for others.
        begin = self.draft_seconds(load) + step / 2.0
        asked = self.rest_seconds(Way.ASKED, load)
        queue = verify / 2.0 if load > 1 else 0.0
        way = asked + queue
        miss = verify + tokens * self.draft_seconds(load) + way + self.rest_seconds(Way.MISSED, load)

        def at_depth(depth: int) -> float:
            drafting = begin + depth * step
            hit = max(verify, drafting) + way
            # A target that leads begins with a whole proposal or is asked. The draft learns the outcome after that.
            if leads and depth == tokens and drafting + asked <= verify:
                hit = verify
            made = hit_rate * expected[depth] + (1.0 - hit_rate) * expected[tokens]
            return (hit_rate * hit + (1.0 - hit_rate) * miss) * expected[tokens] / made

        # As many tokens as the verification leaves time for, or all of them.
        hidden = min(max(int((verify - begin) / step), 1), tokens)
        return min(at_depth(hidden), at_depth(tokens))


@lru_cache(1024)
def load_class(load: int) -> int:
    """Loads of one class share a decision: each up to 8 has its own, then there are four for each doubling."""
    return load if load < 9 else 9 + int(4.0 * math.log2(load / 9.0))
