"""Tests of a server's sampler by its tokens: martingale tests, an e-process, Holm's correction, two samples.

A sampler that draws each token from the distribution that it reports makes *indicator minus probability* a martingale
difference, whatever came before. Every test here is a sum of such differences, each multiplied by a weight that is
known before the token is drawn. Pure functions and accumulators of numpy arrays: no network, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)

ALPHA = 0.0004
"""Most false alarms of an audit by its draws: half for Holm's tests at the end, half for the e-process.

A thousand audits of correct samplers then have 0.4 on average at most, and a total variation of 0.0125 is still found
in 95 % of the audits of 60,000 tokens (`python -m tandem_audit.simulation`)."""
LEVEL = math.log10(2 / ALPHA)
"""Evidence from which on the e-process is a finding, log10."""
MIN_VARIANCE = 20.0
"""A test with less summed variance has no p-value: its sum is too far from normal."""

_BETS = np.array([sign * 0.4 / 2**i for i in range(6) for sign in (1, -1)])
"""Stakes of the e-process. A difference is within [-2, 2], so that a wealth stays positive."""
_USUAL = ("more probable than usual", "less probable than usual")
_BROAD = ("first choice", "first 8", "surprise", *_USUAL, "token bias", "pair bias")
"""Tests to which every token counts: what most faults change."""
_BUCKETS = 1 << 18
"""Hashed pairs are counted in so many places, more than an audit has tokens."""
_RARE = 1e-3
"""Probabilities far below it are not told apart."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Sampled tokens with the distributions that they were drawn from, of one completion or several in a row.

    T tokens, and the M most probable candidates of each.
    """

    ids: IntArray
    """[T, M]: candidates by falling probability; below 0 where there are fewer."""
    probs: FloatArray
    """[T, M]: their probabilities; what is missing to 1 belongs to tokens that are not listed."""
    chosen: IntArray
    """[T]: column of the token that was drawn; M: it is not listed."""
    tokens: IntArray
    """[T]: its id."""
    index: IntArray
    """[T]: its position in its completion."""
    is_usable: BoolArray
    """[T]: False where the distribution is not known well enough. It must not depend on the token that was drawn."""

    def __len__(self) -> int:
        return len(self.tokens)

    def restrict(self, allowed: BoolArray, temperature: float = 1.0) -> Steps:
        """The draw given that it fell among the allowed candidates [T, M], at another temperature: renormalised
        p ** (1 / temperature). This is exact without the normaliser over the whole vocabulary, which a server does not
        report."""
        weights = np.where(allowed & (self.ids >= 0), self.probs ** (1 / temperature), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        is_listed = np.pad(weights > 0, ((0, 0), (0, 1)))
        is_inside = np.take_along_axis(is_listed, self.chosen[:, None], axis=1)[:, 0]
        probs = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        return replace(self, probs=probs, is_usable=self.is_usable & is_inside)


_NONE = np.zeros(0, np.int64)
_NO_STEPS = Steps(np.zeros((0, 1), np.int64), np.zeros((0, 1)), _NONE, _NONE, _NONE, np.zeros(0, bool))


def join_steps(parts: Sequence[Steps]) -> Steps:
    """Several completions, with equally many candidates for each token, as one."""
    return Steps(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Steps)))


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test."""

    __test__ = False  # no test case of pytest's

    name: str
    tokens: int
    """Tokens that it weighed."""
    observed: float
    """Sum of what was drawn, weighted."""
    expected: float
    """Sum of what the reported probabilities expect."""
    z: float
    p: float | None
    """Two-sided; None: too few tokens."""
    adjusted_p: float | None = None
    """After Holm's correction over the family."""

    @property
    def excess(self) -> float:
        """Observed minus expected for each token."""
        return (self.observed - self.expected) / max(self.tokens, 1)


def normal_p(z: float) -> float:
    """Two-sided p-value of a standard normal."""
    return math.erfc(abs(z) / math.sqrt(2))


def martingale_p(total: float, variance: float, third: float) -> tuple[float, float | None]:
    """z-score and two-sided p-value of a sum of martingale differences.

    Rare events make the sum skewed. The Cornish-Fisher correction by the third moment is used only where it lowers the
    z-score, so that it never accuses.
    """
    if variance <= 0:
        return 0.0, None
    z = total / math.sqrt(variance)
    corrected = z - third / variance**1.5 * (z * z - 1) / 6
    least = min(abs(z), max(0.0, math.copysign(1, z) * corrected))
    return z, normal_p(least) if variance >= MIN_VARIANCE else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values (Holm 1979): rejecting those below a level errs at most that often in the whole family."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = largest
    return adjusted


CONFIDENCES = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.0))
"""Ranges of the first choice's probability."""
POSITIONS = 10
"""The first positions of a completion have a test each: proposals begin there at the same place in every completion."""
LAGS = (1, 2)


class Calibration:
    """Tests of draws against their reported distributions, in the order in which they came.

    Two base functions learn how far draws of each token, and of each pair of tokens, were from their probabilities so
    far, and bet on more of the same. Two others learn how probable a token usually is after the last one, which is
    nearer to what a draft knows than the probability in its context is, and so show what a draft's preferences do,
    whose sign differs from context to context. Tables are hashed: a collision costs power, never validity.
    """

    def __init__(self, is_brief: bool = False, modulus: int | None = None) -> None:
        """A brief one, for the shorter looks at other sampling parameters, has only the tests that need no position.
        The modulus is the length of a round in which everything is accepted: proposed tokens + 1, where it is known."""
        self.is_brief = is_brief
        self._modulus = modulus
        self.tokens = 0
        """Tokens weighed so far."""
        self._learnt = {base: np.zeros((2, _BUCKETS)) for base in ("token bias", "pair bias")}
        """[2, buckets]: summed differences and variances."""
        self._seen = np.zeros(_BUCKETS)
        """Summed probabilities of a token after another."""
        self._visits = np.zeros(_BUCKETS)
        """Positions after a token."""
        self.names = [(name, base) for name, base, _ in self._tests(_NO_STEPS, self._moments(_NO_STEPS))]
        """Each test's name, and the base function that it weighs."""
        self.sums = np.zeros((len(self.names), 5))
        """[tests, 5]: draws, expectations, variances, third moments, tokens."""
        self.wealth = np.zeros((len(self.names), len(_BETS)))
        """[tests, bets]: logarithms."""

    def add(self, steps: Steps) -> None:
        """Weigh the draws of some completions. What is learnt from them counts from the next call on."""
        moments = self._moments(steps)
        usable = steps.is_usable.astype(np.float64)
        rows = []
        for _, base, weights in self._tests(steps, moments):
            weight = usable * weights
            drawn, mean, variance, third = moments[base]
            squared = weight * weight
            rows.append(
                [weight * drawn, weight * mean, squared * variance, squared * weight * third, weight != 0]
            )
        table = np.array(rows, np.float64)
        self.sums += table.sum(axis=2)
        differences = table[:, 0] - table[:, 1]
        self.wealth += np.log1p(differences[:, None, :] * _BETS[:, None]).sum(axis=2)
        self._learn(steps)
        self.tokens += int(steps.is_usable.sum())

    def results(self) -> list[TestResult]:
        """Each test, without a correction for their number."""
        found = []
        for (name, _), (drawn, mean, variance, third, count) in zip(self.names, self.sums, strict=True):
            z, p = martingale_p(drawn - mean, variance, third)
            found.append(TestResult(name, int(count), float(drawn), float(mean), z, p))
        return found

    def log_wealths(self) -> FloatArray:
        """[tests]: logarithm of each test's e-value, the mean over its bets."""
        values: FloatArray = np.logaddexp.reduce(self.wealth, axis=1) - math.log(len(_BETS))
        return values

    def detectable(self) -> float | None:
        """Bias of the first choice's frequency that this many tokens find with 95 %; None: too few tokens."""
        _, _, variance, _, count = self.sums[0]
        if variance < MIN_VARIANCE:
            return None
        return float((_Z_FOUND + 1.645) * math.sqrt(variance) / count)

    def _moments(self, steps: Steps) -> dict[str, tuple[FloatArray, ...]]:
        return {name: _moments(steps, *values) for name, values in self._functions(steps).items()}

    def _functions(self, steps: Steps) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Base functions: their values on the candidates [T, M] and on a token that is not listed [T], in [-1, 1]."""
        probs = steps.probs
        none = np.zeros(len(steps))
        functions: dict[str, tuple[FloatArray, FloatArray]] = {}
        for name, rank in (("first choice", 1), ("first 2", 2), ("first 4", 4), ("first 8", 8)):
            # Equal probabilities count together: which of them a server lists first may depend on the draw.
            lowest = probs[:, min(rank, probs.shape[1]) - 1, None]
            functions[name] = (((probs >= lowest * (1 - 1e-9)) & (probs > 0)).astype(np.float64), none)
        nats = -np.log(np.maximum(probs, 1e-300))
        functions["surprise"] = (np.minimum(nats / 6.0, 1.0), none + 1.0)
        functions |= {name: (values, none) for name, values in self._unusual(steps).items()}
        functions |= {base: (self._preferences(steps, base), none) for base in self._learnt}
        if not self.is_brief:
            functions["copied pair"] = ((steps.ids == _find_copies(steps)[:, None]).astype(np.float64), none)
            functions["favoured again"] = (_excess(steps), none)
        return functions

    def _tests(
        self, steps: Steps, moments: dict[str, tuple[FloatArray, ...]]
    ) -> Iterator[tuple[str, str, FloatArray | BoolArray | float]]:
        """Each test: its name, the base function that it weighs, and its weights, in [-1, 1] and known before the token
        is drawn."""
        yield from ((name, name, 1.0) for name in (*_BROAD, "first 2", "first 4"))
        first = steps.probs[:, 0]
        index = steps.index
        for low, high in CONFIDENCES:
            is_within = (first > low) & (first <= high)
            yield f"first choice at confidence {low:g} to {high:g}", "first choice", is_within
        if self.is_brief:
            return
        yield from ((name, name, 1.0) for name in ("copied pair", "favoured again"))
        for i in range(POSITIONS):
            yield f"first choice at position {i}", "first choice", index == i
        drawn = moments["first choice"][0]
        for base in ("first choice", "surprise"):
            difference = (moments[base][0] - moments[base][1]) * steps.is_usable
            yield f"{base} after a confident position", base, _lag(first, index, 1, 0.0) > 0.8
            yield f"{base} after an unlikely token", base, _lag(drawn, index, 1, 1.0) == 0
            for lag in LAGS:
                yield f"{base} with the one {lag} before", base, _lag(difference, index, lag, 0.0)
        for i in range(modulus := self._modulus or 0):
            yield f"first choice at position {i} modulo {modulus}", "first choice", index % modulus == i

    def _buckets(self, steps: Steps, base: str) -> IntArray:
        keys = {
            "token bias": np.zeros_like(steps.tokens),
            "pair bias": _lag(steps.tokens, steps.index, 1, -2) + 3,
        }[base]
        with np.errstate(over="ignore"):
            mixed = (keys[:, None] * np.int64(0x5851F42D4C957F2D) + steps.ids) * np.int64(0x2545F4914F6CDD1D)
        return (mixed >> np.int64(24)) & np.int64(_BUCKETS - 1)

    def _unusual(self, steps: Steps) -> dict[str, FloatArray]:
        """How much more and how much less probable a candidate is than it usually is after the last token. [T, M] each.

        A sampler that leans towards its draft takes the less probable too often: this is its likelihood's derivative,
        were the draft what is usual. Recovery with the draft's own noise prefers what the draft thinks far less
        probable than the target does, at the cost of what it thinks slightly less probable.
        """
        visits = self._visits[self._buckets_before(steps)][:, None]
        usual = (self._seen[self._buckets(steps, "pair bias")] + steps.probs) / (visits + 1)
        ratios = (usual + _RARE) / (steps.probs + _RARE)
        more = np.clip(-np.log(ratios) - 0.5, 0.0, 2.0) / 2
        less = np.clip(ratios - 1, -1.0, 3.0) / 3
        is_listed = steps.ids >= 0
        return {_USUAL[0]: np.where(is_listed, more, 0.0), _USUAL[1]: np.where(is_listed, less, 0.0)}

    def _buckets_before(self, steps: Steps) -> IntArray:
        return (_lag(steps.tokens, steps.index, 1, -2) + 3) & (_BUCKETS - 1)

    def _preferences(self, steps: Steps, base: str) -> FloatArray:
        sums, variances = self._learnt[base][:, self._buckets(steps, base)]
        scores: FloatArray = np.clip(sums / np.sqrt(variances + 1.0), -2.0, 2.0) / 2.0
        return np.where(steps.ids >= 0, scores, 0.0)

    def _learn(self, steps: Steps) -> None:
        is_drawn = steps.chosen[:, None] == np.arange(steps.ids.shape[1])
        is_counted = (steps.ids >= 0) & steps.is_usable[:, None]
        for base, table in self._learnt.items():
            buckets = self._buckets(steps, base)[is_counted]
            np.add.at(table[0], buckets, (is_drawn - steps.probs)[is_counted])
            np.add.at(table[1], buckets, (steps.probs * (1 - steps.probs))[is_counted])
        np.add.at(self._seen, self._buckets(steps, "pair bias"), steps.probs * is_counted)
        np.add.at(self._visits, self._buckets_before(steps), steps.is_usable)


_Z_FOUND = -NormalDist().inv_cdf(ALPHA / 4 / len(_BROAD) / 2)
"""z-score that Holm's correction asks of a broad test: a quarter of the level over their number, two-sided."""


def _moments(steps: Steps, values: FloatArray, unlisted: FloatArray) -> tuple[FloatArray, ...]:
    """A function's value at the drawn token, and its mean, variance and third central moment, each [T]."""
    rest = np.maximum(0.0, 1.0 - steps.probs.sum(axis=1))
    drawn = np.take_along_axis(
        np.concatenate([values, unlisted[:, None]], axis=1), steps.chosen[:, None], axis=1
    )[:, 0]
    mean = (steps.probs * values).sum(axis=1) + rest * unlisted
    listed = values - mean[:, None]
    other = unlisted - mean
    weighted = steps.probs * listed * listed
    variance = weighted.sum(axis=1) + rest * other * other
    third = (weighted * listed).sum(axis=1) + rest * other * other * other
    return drawn, mean, variance, third


def _lag(values: NDArray[_T], index: IntArray, lag: int, filling: float) -> NDArray[_T]:
    """The value so many positions before, in the same completion."""
    moved = np.full_like(values, filling)
    moved[lag:] = values[:-lag]
    return np.where(index >= lag, moved, np.full_like(values, filling))


def _find_copies(steps: Steps) -> IntArray:
    """The token behind the last occurrence of the previous one in this completion, as n-gram drafts propose; or -2."""
    found = np.full(len(steps), -2, np.int64)
    followers: dict[int, int] = {}
    before = -2
    for i, (token, index) in enumerate(zip(steps.tokens.tolist(), steps.index.tolist(), strict=True)):
        if index == 0:
            followers = {}
            before = -2
        found[i] = followers.get(before, -2)
        followers[before] = token
        before = token
    return found


def _excess(steps: Steps) -> FloatArray:
    """The excess with which each candidate was drawn so far in its own completion, in [-1, 1]: noise that is used again
    favours the same tokens again. [T, M]."""
    count = len(steps)
    buckets = 256
    rows = np.broadcast_to(np.arange(count)[:, None], steps.ids.shape)
    columns = steps.ids & (buckets - 1)
    is_listed = (steps.ids >= 0) & steps.is_usable[:, None]
    is_drawn = steps.chosen[:, None] == np.arange(steps.ids.shape[1])
    start = np.maximum.accumulate(np.where(steps.index == 0, np.arange(count), 0))
    earlier = []
    for values in (is_drawn - steps.probs, steps.probs * (1 - steps.probs)):
        table = np.zeros((count + 1, buckets))
        np.add.at(table, (rows[is_listed] + 1, columns[is_listed]), values[is_listed])
        summed = table.cumsum(axis=0)
        earlier.append(summed[rows, columns] - summed[start[:, None], columns])
    return np.where(steps.ids >= 0, np.clip(earlier[0] / np.sqrt(earlier[1] + 0.1), -2.0, 2.0) / 2.0, 0.0)


@dataclass(slots=True)
class Evidence:
    """All calibrations of a run as one family: one e-process, one correction.

    A mean of the tests' e-values, in which the broad ones have half the weight, is an e-value, and a martingale in
    time: for a right sampler with at most the probability of a level it ever reaches 1 / level (Ville 1939). So one may
    look, and stop, whenever one likes.
    """

    calibrations: dict[str, Calibration]
    path: list[tuple[int, float]] = field(default_factory=list)
    """Tokens so far, and the logarithm of the evidence then, base 10."""

    def add(self, name: str, steps: Steps) -> None:
        self.calibrations[name].add(steps)
        logs = np.concatenate([each.log_wealths() for each in self.calibrations.values()])
        broad = np.array([is_broad for _, _, is_broad in self._places()])
        halves = [np.logaddexp.reduce(logs[part]) - math.log(part.sum()) for part in (broad, ~broad)]
        value = float(np.logaddexp(*halves) - math.log(2)) / math.log(10)
        self.path.append((sum(each.tokens for each in self.calibrations.values()), value))

    @property
    def max_log10(self) -> float:
        """The highest evidence reached so far, logarithm to base 10."""
        return max((value for _, value in self.path), default=0.0)

    def results(self) -> dict[str, list[TestResult]]:
        """Each calibration's tests, corrected over all of them.

        The few broad tests share one half of the level, all others the other half.
        """
        found = {name: each.results() for name, each in self.calibrations.items()}
        for is_broad in (True, False):
            places = [(name, i) for name, i, broad in self._places() if broad is is_broad]
            adjusted = holm([found[name][i].p for name, i in places])
            for (name, i), p in zip(places, adjusted, strict=True):
                doubled = None if p is None else min(1.0, 2 * p)
                found[name][i] = replace(found[name][i], adjusted_p=doubled)
        return found

    def _places(self) -> list[tuple[str, int, bool]]:
        """Each test: its calibration, its place there, and whether every token counts in it."""
        return [
            (name, i, test in _BROAD and not each.is_brief)
            for name, each in self.calibrations.items()
            for i, (test, _) in enumerate(each.names)
        ]

    @property
    def level(self) -> float:
        """The lowest level at which the e-process, or a test after Holm's correction, is a finding."""
        adjusted = [
            test.adjusted_p
            for tests in self.results().values()
            for test in tests
            if test.adjusted_p is not None
        ]
        return 2 * min([*adjusted, 10**-self.max_log10, 0.5])

    @property
    def is_finding(self) -> bool:
        """True if the sampler is not right, with at most `ALPHA` false alarms."""
        return self.level < ALPHA


def permutation_p(
    cells: IntArray, units: IntArray, strata: IntArray, is_second: BoolArray, permutations: int, seed: int = 0
) -> float:
    """p-value of two samples being of one kind, exact whatever the counts, by permutation within strata.

    The statistic is the sum over cells of (a - b)**2 / (a + b). It stops early once 50 permutations reach it (Besag and
    Clifford 1991). Of each thing that was counted there is its category and its completion, both [N]; of each
    completion its prompt, labels being exchanged only within one, and whether it is of the second sample.
    """
    generator = np.random.default_rng(seed)
    total = np.bincount(cells)
    counted = np.maximum(total, 1)
    order = np.argsort(strata, kind="stable")

    def statistic(labels: BoolArray) -> float:
        signs = np.where(labels, 1.0, -1.0)
        difference = np.bincount(cells, weights=signs[units], minlength=len(total))
        return float((difference**2 / counted).sum())

    limit = statistic(is_second) * (1 - 1e-12)
    reached = 0
    labels = np.empty_like(is_second)
    for done in range(1, permutations + 1):
        # Sorted by stratum and random number, the places of each stratum hold its labels in a random order.
        shuffled = np.lexsort((generator.random(len(strata)), strata))
        labels[order] = is_second[shuffled]
        reached += statistic(labels) >= limit
        if reached == 50:
            return reached / done
    return (reached + 1) / (permutations + 1)
