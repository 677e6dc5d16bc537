"""Cost model of a round: the step profiles of its services, the way to them, and the coordinator's own work.

    seconds(load, K) = verify(load, load * (K + 1)) + K * draft(load) + rest(load, K > 0)

A service measures its profile when it has warmed up, so that costs are known before the first round, and nothing is
tried in order to learn them. The steps that it makes move its profile: all of it by one slow factor, as when other
work comes to the machine, and the nearest point by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from coordinator.speculation.gains import WINDOW
from coordinator.stats.rounds import RoundCost
from tandem.types import StepProfile

PER_8_ROWS = 0.1
"""Share by which a step takes longer for each 8 rows beyond the first, where nothing is known of it: the GPUs of the
published measurements spend most of a step on reading weights."""
SURPRISE = 2.0
"""What is this many times as much as predicted is a surprise. A step counts as no more: a pause of the machine is no
cost. A probe that accepts more, and one token, is followed by another at once; by chance one in ten does."""
_USUAL_SHAPE = StepProfile(
    {
        (sequences, tokens): 1.0 + PER_8_ROWS * (sequences * tokens - 1) / 8
        for sequences in (1, 32)
        for tokens in (1, 9)
    }
)
"""Shape of a service that reports no profile. The first steps give its level."""


NO_PROFILE = StepProfile()


class StepCosts:
    """Seconds of a service's step, by the sequences and tokens in it."""

    __slots__ = ("_count", "_factor", "_places", "_seconds", "_sequences", "_tokens")

    def __init__(self, profile: StepProfile = NO_PROFILE) -> None:
        known = profile.seconds or _USUAL_SHAPE.seconds
        least = min(sequences for sequences, _ in known)
        self._tokens = sorted(tokens for sequences, tokens in known if sequences == least)
        # Large sizes may be missing: those of too few points are predicted from the smaller ones.
        self._sequences = sorted(
            sequences
            for sequences in {sequences for sequences, _ in known}
            if all((sequences, tokens) in known for tokens in self._tokens)
        )
        self._seconds = [[known[size, tokens] for tokens in self._tokens] for size in self._sequences]
        self._places: dict[tuple[int, int], _Place] = {}
        self._factor = 1.0
        self._count = math.inf if profile.seconds else 0.0
        """Measurements that its level rests on."""

    @property
    def is_known(self) -> bool:
        """True if it has a profile, or a step was measured."""
        return self._count > 0.0

    def copy(self) -> StepCosts:
        """The estimates with which another replica begins."""
        other = StepCosts()
        other._sequences, other._tokens = self._sequences, self._tokens
        other._seconds = [list(row) for row in self._seconds]
        other._factor, other._count = self._factor, min(self._count, 1.0)
        return other

    def seconds(self, sequences: int, tokens: int) -> float:
        """Predicted seconds of a step of so many sequences with so many tokens in all."""
        low, high, share, j, k, part = self._place(sequences, tokens)
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
        if not self._count:
            self._count, self._factor = weight, self._factor * ratio
            return
        self._count += weight
        share = max(1.0 / WINDOW, 1.0 / (1.0 + self._count)) * weight
        if ratio > SURPRISE:
            ratio = SURPRISE
        elif ratio < 1.0 / SURPRISE and self._count > WINDOW:
            ratio = 1.0 / SURPRISE
        change = 1.0 + share * (ratio - 1.0)
        self._factor *= change
        low, high, between, j, k, part = self._place(sequences, tokens)
        (high if between > 0.5 else low)[k if part > 0.5 else j] *= change

    def _place(self, sequences: int, tokens: int) -> _Place:
        """The four points of the profile around a step; the nearest ones for a step beyond them."""
        found = self._places.get((sequences, tokens))
        if found is None:
            i, share = _interval(self._sequences, sequences)
            j, part = _interval(self._tokens, tokens / sequences)
            above = min(i + 1, len(self._seconds) - 1)
            right = min(j + 1, len(self._tokens) - 1)
            found = self._places[sequences, tokens] = (
                self._seconds[i],
                self._seconds[above],
                share,
                j,
                right,
                part,
            )
        return found


_Place = tuple[list[float], list[float], float, int, int, float]
"""Rows of seconds, the place between them, two columns, the place between those."""


def _interval(points: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of a value among points, and where it lies in it."""
    if len(points) == 1:
        return 0, 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


class RestCosts:
    """Seconds of a round in which neither service computes: the way to them, and the coordinator's work."""

    __slots__ = ("_means", "_prior")

    def __init__(self, prior_seconds: float) -> None:
        self._prior = prior_seconds
        """The round trips of its messages, by health checks."""
        self._means: dict[int, list[float]] = {}
        """By load class: [weight, mean]."""

    def seconds(self, load: int) -> float:
        """Predicted: the mean at the nearest load."""
        if not self._means:
            return self._prior
        wanted = load_class(load)
        return self._means[min(self._means, key=lambda known: abs(known - wanted))][1]

    def add(self, load: int, seconds: float) -> None:
        """Count a round of one of so many requests."""
        known = load_class(load)
        entry = self._means.get(known)
        if entry is None:
            self._means[known] = [1.0, seconds]
            return
        entry[0] = min(entry[0] + 1.0 / load, float(WINDOW))
        limit = SURPRISE * entry[1]
        entry[1] += (min(seconds, limit) - entry[1]) / load / entry[0]


class CostModel:
    """Predicts rounds on one target with one draft and one kind of rows, which draft nothing ahead."""

    __slots__ = ("_alone", "_drafted", "draft", "target")

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts,
        target_trip_seconds: float = 0.0,
        draft_trip_seconds: float = 0.0,
    ) -> None:
        self.target = target
        self.draft = draft
        self._alone = RestCosts(target_trip_seconds)
        self._drafted = RestCosts(target_trip_seconds + draft_trip_seconds)

    @property
    def is_known(self) -> bool:
        """True if predictions have a level."""
        return self.target.is_known and self.draft.is_known

    def add(self, load: int, cost: RoundCost) -> None:
        """Count a round, with the sequences that shared the target."""
        weight = 1.0 / cost.verify_sequences
        self.target.add(cost.verify_sequences, cost.verify_tokens, cost.verify_seconds, weight)
        if cost.proposed:
            drafting = max(cost.draft_sequences, 1)
            self.draft.add(drafting, drafting, cost.draft_seconds / cost.proposed, 1.0 / drafting)
        if cost.is_uniform:
            rest = max(cost.seconds - cost.verify_seconds - cost.draft_seconds, 0.0)
            (self._drafted if cost.proposed else self._alone).add(load, rest)

    def verify_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a verification in which each of `load` sequences has so many proposed tokens."""
        return self.target.seconds(load, load * (proposed + 1))

    def draft_seconds(self, load: int) -> float:
        """Predicted seconds of one step of the draft."""
        return self.draft.seconds(load, load)

    def rest_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round beside the services' steps."""
        return (self._drafted if proposed else self._alone).seconds(load)

    def seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round."""
        drafting = proposed * self.draft_seconds(load) if proposed else 0.0
        return self.verify_seconds(load, proposed) + drafting + self.rest_seconds(load, proposed)


@lru_cache(1024)
def load_class(load: int) -> int:
    """Loads of one class share a decision: each up to 8 has its own, then there are four for each doubling."""
    return load if load < 9 else 9 + int(4.0 * math.log2(load / 9.0))
