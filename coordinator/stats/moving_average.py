"""Moving averages of times."""

from __future__ import annotations

# Twenty measurements or so count: enough to even out noise, few enough to follow a change of load within seconds.
_NEWEST_WEIGHT = 0.1


class MovingAverage:
    """An exponentially weighted moving average."""

    def __init__(self, newest_weight: float = _NEWEST_WEIGHT) -> None:
        self.value: float | None = None
        """None before the first measurement."""
        self._newest_weight = newest_weight

    def add(self, measured: float) -> None:
        """Count a measurement. The first one is the average."""
        if self.value is None:
            self.value = measured
        else:
            self.value += self._newest_weight * (measured - self.value)
