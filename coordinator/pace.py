"""How long the parts of a request's rounds take, and how long its draft is therefore waited for."""

from __future__ import annotations

from coordinator.averages import MovingAverage

_VERIFICATIONS = 4.0
"""A draft is late by as many verifications when it is waited for no longer."""
_LEAST_SECONDS = 0.25
"""Shorter waits would take a hiccup of the machine for a lost draft."""
_MOST_SECONDS = 0.8
"""A draft that hangs stops a stream once, for less than a second."""


class Pace:
    """Times of one request's rounds."""

    def __init__(self, patience_seconds: float | None) -> None:
        self._patience_seconds = patience_seconds
        self._reading: float | None = None
        self._has_stepped = False
        self.proposing = MovingAverage()
        self.verifying = MovingAverage()
        """Of proposals that are not empty."""
        self.extending = MovingAverage()
        """Of empty proposals: the target alone."""

    def verified(self, seconds: float, proposed: int, *, is_first: bool) -> None:
        """The target took so long over a proposal of so many tokens; for the first of its stream it read all tokens."""
        self._has_stepped = not is_first
        if is_first:
            self._reading = seconds
        elif proposed:
            self.verifying.add(seconds)
        else:
            self.extending.add(seconds)

    def take_step(self) -> bool:
        """Whether the target took a step since this was last asked, and not one to read all tokens."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    @property
    def patience_seconds(self) -> float:
        """How long to wait for a proposal: its usual time and a few verifications."""
        if self._patience_seconds is not None:
            return self._patience_seconds
        verification = self.verifying.value or self.extending.value or self._reading or 0.0
        usual = self.proposing.value or 0.0
        return min(max(usual + _VERIFICATIONS * verification, _LEAST_SECONDS), _MOST_SECONDS)
