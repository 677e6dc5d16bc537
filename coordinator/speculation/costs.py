"""Cost model of a round: the step profiles of its services, the way to them, and the coordinator's own work.

    seconds(load, K) = verify(load, load * (K + 1)) + K * draft(load) + rest(load, K > 0)

A service measures its profile when it has warmed up, so that costs are known before the first round, and nothing is
tried in order to learn them. The steps that it makes move its profile: the nearest point, and all of it by one slow
factor, as when other work comes to the machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from coordinator.speculation.gains import DOUBT, WINDOW
from coordinator.stats.rounds import RoundCost
from tandem.types import StepProfile

PER_8_ROWS = 0.1
"""Share by which a step takes longer for each 8 rows beyond the first, where nothing is known of it: the GPUs of the
published measurements spend most of a step on reading weights."""
SURPRISE = 2.0
"""Factor beyond a prediction that is a surprise. A step counts as no more: a pause of the machine is no
cost. A probe that accepts more, and one token, is followed by another at once; by chance one in ten does."""
TARGET_COMMON = 1.0 / 8.0
"""Share of a target's surprise that moves its steps of all other sizes. The draft of a shared machine slows down the
verifications of proposals, and not the steps of the target alone."""
_USUAL_SHAPE = StepProfile(
    {
        (sequences, tokens): 1.0 + PER_8_ROWS * (sequences * tokens - 1) / 8
        for sequences in (1, 32)
        for tokens in (1, 9)
    }
)
"""Shape of a service that reports no profile. The first steps give its level."""
NO_PROFILE = StepProfile()

KnownT = TypeVar("KnownT")


class StepCosts:
    """Seconds of a service's step, by the sequences and tokens in it."""

    __slots__ = ("_common", "_counts", "_factor", "_places", "_seconds", "_sequences", "_tokens", "is_known")

    def __init__(self, profile: StepProfile = NO_PROFILE, common: float = 1.0) -> None:
        """
        Args:
            profile: What the service measured.
            common: Share of a step's surprise that moves the steps of all other sizes.
        """
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
        self._places: dict[tuple[int, int], tuple[int, float, int, float]] = {}
        self._factor = 1.0
        # Without a profile its level is not known, and each step tells something of it.
        self._common = common if profile.seconds else 1.0
        count = DOUBT if profile.seconds else 0.0
        self._counts = [[count] * len(self._tokens) for _ in self._sequences]
        """Steps that each size rests on."""
        self.is_known = bool(profile.seconds)
        """True if it has a profile, or a step was measured."""

    def copy(self) -> StepCosts:
        """The estimates with which another replica begins."""
        other = StepCosts()
        other._common = self._common
        other._sequences, other._tokens = self._sequences, self._tokens
        other._seconds = [list(row) for row in self._seconds]
        other._counts = [[1.0] * len(row) for row in self._counts]
        other._factor, other.is_known = self._factor, self.is_known
        return other

    def doubt(self, sequences: int, tokens: int) -> None:
        """Let what is known of a size weigh as little as a step: it was long ago, and those that follow are to tell."""
        row, column = self._nearest(sequences, tokens)
        self._counts[row][column] = min(self._counts[row][column], 1.0)

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
        counts = self._counts[row]
        counts[column] += weight
        share = max(1.0 / WINDOW, 1.0 / (1.0 + counts[column])) * weight
        if counts[column] > WINDOW:
            ratio = max(ratio, 1.0 / SURPRISE)
        ratio = min(ratio, SURPRISE)
        self._factor *= 1.0 + share * self._common * (ratio - 1.0)
        self._seconds[row][column] *= 1.0 + share * (ratio - 1.0)

    def _nearest(self, sequences: int, tokens: int) -> tuple[int, int]:
        i, share, j, part = self._place(sequences, tokens)
        last_row, last_column = len(self._sequences) - 1, len(self._tokens) - 1
        return min(i + (share > 0.5), last_row), min(j + (part > 0.5), last_column)

    def _place(self, sequences: int, tokens: int) -> tuple[int, float, int, float]:
        """The interval of a step's sequences in the profile, the place in it, and the same of its tokens."""
        found = self._places.get((sequences, tokens))
        if found is None:
            found = self._places[sequences, tokens] = (
                *_interval(self._sequences, sequences),
                *_interval(self._tokens, tokens / sequences),
            )
        return found


def _interval(points: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of a value among points, and where it lies in it."""
    if len(points) == 1:
        return 0, 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


class RestCosts:
    """Seconds of a round in which neither service computes: the way to them, and the coordinator's work."""

    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int, list[float]] = {}
        """By load class: [weight, mean]."""

    def seconds(self, load: int) -> float | None:
        """Predicted: the mean at the nearest load; None before any round."""
        return nearest(self._means, load)[1] if self._means else None

    def least(self) -> float | None:
        """At the load at which it is least; None before any round."""
        return min((mean for _, mean in self._means.values()), default=None)

    def doubt(self, load: int) -> None:
        """Let what is known at a load weigh as little as one round of all: it was long ago."""
        if (known := self._means.get(load_class(load))) is not None:
            known[0] = min(known[0], 1.0)

    def add(self, load: int, seconds: float, way: float) -> None:
        """Count a round of one of so many requests.

        Args:
            load: So many requests.
            seconds: What the round took beside the services' steps.
            way: The way to the services by their health checks; 0 where it is not known. The first rounds are cold, so
                it counts as much as one.
        """
        known = load_class(load)
        if known not in self._means:
            before = self.seconds(load)
            self._means[known] = [1.0, (way if before is None else before) if way else seconds]
        entry = self._means[known]
        entry[0] = min(entry[0] + 1.0 / load, float(WINDOW))
        # Requests that wait for each other make long rounds common: only what is twice a surprise is a pause.
        limit = 2.0 * SURPRISE * max(entry[1], way) or seconds
        entry[1] += (min(seconds, limit) - entry[1]) / load / entry[0]


class CostModel:
    """Predicts rounds on one target with one draft and one kind of rows, which draft nothing ahead."""

    __slots__ = ("_alone", "_drafted", "_leads", "_led", "draft", "leads_with_proposals", "target", "trips")

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts,
        target_trip_seconds: float = 0.0,
        draft_trip_seconds: float = 0.0,
        leads: bool = False,
        leads_with_proposals: bool = False,
    ) -> None:
        """
        Args:
            target_trip_seconds: The way there and back.
            draft_trip_seconds: Likewise.
            leads: True if the target, left alone, begins the next rounds before it is asked.
            leads_with_proposals: True if it also begins those whose proposals are drafted ahead.
        """
        self.target = target
        self.draft = draft
        self._leads = leads
        self.leads_with_proposals = leads_with_proposals
        self._alone, self._drafted = RestCosts(), RestCosts()
        self._led: dict[int, list[float]] = {}
        """Rounds that the target begins by itself, by load class: [weight, mean seconds]. Steps that follow each other
        at once are faster than those between which it waits."""
        self.trips: tuple[float, ...] = (target_trip_seconds, draft_trip_seconds)
        """By health checks: the first guess, since a check takes longer than a message between two steps."""

    @property
    def is_known(self) -> bool:
        """True if predictions have a level."""
        return self.target.is_known and self.draft.is_known

    def doubt_alone(self, load: int) -> None:
        """Let what is known of the target alone weigh as little as one round of all: it was long ago."""
        self.target.doubt(load, load)
        if (known := self._led.get(load_class(load))) is not None:
            known[0] = min(known[0], 1.0)

    def doubt_drafted(self, load: int, proposed: int) -> None:
        """The same of rounds with so many proposed tokens."""
        self.target.doubt(load, load * (proposed + 1))
        self.draft.doubt(load, load)
        self._drafted.doubt(load)

    def add(self, load: int, cost: RoundCost, *, is_settled: bool = True) -> None:
        """Count a round, with the sequences that shared the target.

        Args:
            load: So many requests.
            cost: What it cost.
            is_settled: False for the first round of its kind: the first that the target began by itself follows one
                that was asked for, and for the first proposal the draft read all that was committed before.
        """
        weight = 1.0 / cost.verify_sequences
        self.target.add(cost.verify_sequences, cost.verify_tokens, cost.verify_seconds, weight)
        if cost.proposed and not is_settled:
            return
        if cost.proposed:
            drafting = max(cost.draft_sequences, 1)
            self.draft.add(drafting, drafting, cost.draft_seconds / cost.proposed, 1.0 / drafting)
        if cost.is_uniform and cost.was_led and not cost.proposed:
            if is_settled:
                known = self._led.setdefault(load_class(load), [0.0, cost.seconds])
                known[0] = min(known[0] + 1.0 / load, float(WINDOW))
                known[1] += (min(cost.seconds, 2.0 * SURPRISE * known[1]) - known[1]) / load / known[0]
        elif cost.is_uniform:
            rest = max(cost.seconds - cost.verify_seconds - cost.draft_seconds, 0.0)
            if cost.proposed:
                self._drafted.add(load, rest, sum(self.trips))
            else:
                self._alone.add(load, rest, self.trips[0])

    def verify_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a verification in which each of `load` sequences has so many proposed tokens."""
        return self.target.seconds(load, load * (proposed + 1))

    def draft_seconds(self, load: int) -> float:
        """Predicted seconds of one step of the draft."""
        return self.draft.seconds(load, load)

    def rest_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round beside the services' steps. The way to a target that leads costs nothing."""
        if self._leads and not proposed:
            return 0.0
        return self.asked_seconds(load, proposed)

    def asked_seconds(self, load: int, proposed: int) -> float:
        """The same of a round that the target does not begin by itself."""
        own, other = (self._drafted, self._alone) if proposed else (self._alone, self._drafted)
        known = own.seconds(load)
        if known is not None:
            return known
        least = other.least()
        if least is not None:  # a proposal is one more question and answer
            return 2.0 * least if proposed else least / 2.0
        return sum(self.trips) if proposed else self.trips[0]

    def seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round."""
        if self._leads and not proposed and (known := self._led.get(load_class(load))) is not None:
            return known[1]
        drafting = proposed * self.draft_seconds(load) if proposed else 0.0
        return self.verify_seconds(load, proposed) + drafting + self.rest_seconds(load, proposed)


def nearest(by_load: Mapping[int, KnownT], load: int) -> KnownT:
    """The entry of the load class that is nearest to a load; there must be one."""
    wanted = load_class(load)
    return by_load[min(by_load, key=lambda known: abs(known - wanted))]


@lru_cache(1024)
def load_class(load: int) -> int:
    """Loads of one class share a decision: each up to 8 has its own, then there are four for each doubling."""
    return load if load < 9 else 9 + int(4.0 * math.log2(load / 9.0))
