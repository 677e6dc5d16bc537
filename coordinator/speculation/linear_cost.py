"""Seconds as a linear function of two counts, fitted online to a small table."""

from __future__ import annotations

import math

MAX_WEIGHT = 48.0
"""A table entry averages about this many measurements: enough to even out noise, few enough to follow a change."""
MIN_CLIP_WEIGHT = 3.0
"""Below this weight an entry begins anew with a measurement that is far below its mean."""
CLIP = 2.5
"""Outliers are clipped to the entry's mean times this: a pause of the machine is not a cost."""
FIRST_CLIP = 4.0
"""Bound on an entry's first measurement, relative to the line's prediction."""
REFIT_AFTER = 32
"""Measurements after which the line is fitted again; earlier after a new entry."""
RIDGE = 0.003
"""Pulls both slopes to 0 where the table cannot distinguish them from the constant."""


class LinearCost:
    """Fits seconds = c + c_a * a + c_b * b with no coefficient below 0.

    Each pair of counts has its own moving average, and the line is fitted to these averages, relative to their size. So
    a load that lasts for an hour does not displace the measurements of others, and a rare load counts by its few
    measurements.
    """

    __slots__ = ("_coefficients", "_fit_in", "_fit_pause", "_table")

    def __init__(self) -> None:
        self._table: dict[int, list[float]] = {}
        """By size class of a and b: [weight, mean a, mean b, mean seconds]."""
        self._coefficients = (0.0, 0.0, 0.0)
        self._fit_in = 0
        """Measurements until the line is fitted again."""
        self._fit_pause = 1

    @property
    def is_known(self) -> bool:
        """True if anything was measured."""
        return bool(self._table)

    def add(self, a: int, b: int, seconds: float, weight: float = 1.0) -> None:
        """Count a measurement; `weight` is below 1 where several report the same step."""
        key = (_CLASSES[a] if a < _LAST else _LAST_CLASS) * MAX_CLASSES + (
            _CLASSES[b] if b < _LAST else _LAST_CLASS
        )
        self._fit_in -= 1
        entry = self._table.get(key)
        if entry is None:
            if self._table and (expected := self.predict(a, b)) > 0.0:
                seconds = min(max(seconds, expected / FIRST_CLIP), expected * FIRST_CLIP)
            self._table[key] = [weight, a, b, seconds]
            self._fit_in, self._fit_pause = 0, 1
            return
        total, _, _, mean = entry
        if seconds > mean * CLIP:
            if total >= 1.0:
                seconds = mean * CLIP
        elif seconds < mean / CLIP:
            if total >= MIN_CLIP_WEIGHT:
                seconds = mean / CLIP
            else:
                total = 0.0  # the few measurements before it were outliers
        if total < MAX_WEIGHT:
            total += weight
            entry[0] = total
        share = weight / total
        entry[1] += share * (a - entry[1])
        entry[2] += share * (b - entry[2])
        entry[3] += share * (seconds - mean)

    def predict(self, a: float, b: float) -> float:
        """Seconds for these counts; 0 where nothing was measured."""
        if self._fit_in <= 0 and self._table:
            self._fit()
        constant, per_a, per_b = self._coefficients
        return constant + per_a * a + per_b * b

    def copy(self) -> LinearCost:
        """A copy of the estimates, with which a new replica begins."""
        other = LinearCost()
        other._table = {
            key: [min(weight, MIN_CLIP_WEIGHT), *rest] for key, (weight, *rest) in self._table.items()
        }
        return other

    def forget(self, kept: float) -> None:
        """Let each mean count as at most so many measurements, so that new ones move it."""
        for entry in self._table.values():
            entry[0] = min(entry[0], kept)

    def _fit(self) -> None:
        """Weighted least squares; a slope below 0 is dropped, and the other one fitted again."""
        self._fit_in = self._fit_pause
        self._fit_pause = min(2 * self._fit_pause, REFIT_AFTER)
        sums = self._sums()
        found = _solve(sums, True, True) or _solve(sums, True, False) or _solve(sums, False, True)
        if found is not None and min(found) < 0.0:
            found = _solve(sums, found[1] >= 0.0, found[2] >= 0.0)
        if found is None or min(found) < 0.0:
            found = _solve(sums, False, False)
        self._coefficients = found or (0.0, 0.0, 0.0)

    def _sums(self) -> tuple[float, ...]:
        w_ = a_ = b_ = aa = ab = bb = y_ = ay = by = 0.0
        for weight, a, b, seconds in self._table.values():
            relative = weight / max(seconds * seconds, 1e-18)
            wa, wb = relative * a, relative * b
            w_ += relative
            a_ += wa
            b_ += wb
            aa += wa * a
            ab += wa * b
            bb += wb * b
            y_ += relative * seconds
            ay += wa * seconds
            by += wb * seconds
        return w_, a_, b_, aa * (1 + RIDGE), ab, bb * (1 + RIDGE), y_, ay, by


def _solve(sums: tuple[float, ...], use_a: bool, use_b: bool) -> tuple[float, float, float] | None:
    """Coefficients of the wanted features by Cramer's rule; None where they are not determined.

    A constant below 0 is set to 0, and the slopes are scaled to the mean that was measured.
    """
    w_, a_, b_, aa, ab, bb, y_, ay, by = sums
    if w_ <= 0.0:
        return None
    # The constant is eliminated first, which leaves the features about their means.
    caa, cab, cbb = aa - a_ * a_ / w_, ab - a_ * b_ / w_, bb - b_ * b_ / w_
    cay, cby = ay - a_ * y_ / w_, by - b_ * y_ / w_
    per_a = per_b = 0.0
    if use_a and use_b:
        determinant = caa * cbb - cab * cab
        if determinant <= 1e-12 * caa * cbb:
            return None
        per_a, per_b = (cay * cbb - cby * cab) / determinant, (cby * caa - cay * cab) / determinant
    elif use_a:
        per_a = cay / caa if caa > 0.0 else 0.0
    elif use_b:
        per_b = cby / cbb if cbb > 0.0 else 0.0
    sloped = per_a * a_ + per_b * b_
    if y_ < sloped and min(per_a, per_b) >= 0.0:
        return 0.0, per_a * y_ / sloped, per_b * y_ / sloped
    return (y_ - sloped) / w_, per_a, per_b


def size_class(count: int) -> int:
    """The size class of a count: each count up to 8 has its own, then there are four per doubling."""
    return _CLASSES[count] if count < _LAST else _LAST_CLASS


def _class(count: int) -> int:
    return count if count < 9 else 9 + int(4.0 * math.log2(count / 9.0))


_LAST = 4095
_CLASSES = tuple(_class(count) for count in range(_LAST + 1))
_LAST_CLASS = _CLASSES[_LAST]
MAX_CLASSES = 64
"""More than there are."""
