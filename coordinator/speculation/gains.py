"""Gain model: how many proposed tokens are accepted, by position; shared by requests of a kind, refined by each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FIRST_RATE = 0.6
"""Acceptance at the first position before any was measured: about that of a draft of the same family (demo pair 0.55
to 0.7), and enough that drafting is begun."""
DOUBT = 8.0
"""Weight of the prior, which is the rate of the position before, in proposals. In simulations 2 loses 1.5 % of the
first 100 rounds by giving up too early."""
MEMORY = 300.0
"""Proposals that rates average over: their standard error is then 3 %, the width of the hysteresis."""
CHANGE = 3.5
"""Standard deviations by which a window of proposals must differ for older ones to be forgotten: by chance one window
in 2000 does."""
WINDOW = 24
"""Proposals in such a window, at most: enough to tell a rate of 0.4 from 0.8."""

TEMPERATURE_RANGES = (0.0, 0.3, 0.6, 0.85, 1.15)
"""Upper ends of the temperature ranges that share acceptance counts; the last range is open."""


class RequestKind(NamedTuple):
    """Requests that share acceptance counts."""

    draft: str
    """Name of the draft's model."""
    rule: str
    """Name of the acceptance rule."""
    temperature_range: int
    """Index into `TEMPERATURE_RANGES`; its length for temperatures above the last."""


def request_kind(draft: str, rule: str, temperature: float) -> RequestKind:
    """The kind of a request."""
    index = next(
        (i for i, end in enumerate(TEMPERATURE_RANGES) if temperature <= end), len(TEMPERATURE_RANGES)
    )
    return RequestKind(draft, rule, index)


def temperature_words(temperature_range: int) -> str:
    """A temperature range in words, for instance "0.85-1.15"."""
    ends = TEMPERATURE_RANGES
    if temperature_range == 0:
        return "0"
    lower = f"{ends[temperature_range - 1]:g}"
    return f"{lower}-{ends[temperature_range]:g}" if temperature_range < len(ends) else f"above {lower}"


class AcceptanceModel:
    """Conditional acceptance rates: at each position, given that all before it were accepted.

    The counts are those of a Beta distribution. Its prior is the rate of the position before, and for the first
    position the rate under other temperatures, if known.
    """

    __slots__ = ("_accepted", "_first_rate", "_reached", "_window")

    def __init__(self, first_rate: float = FIRST_RATE) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._first_rate = first_rate
        self._window = (0, 0.0, 0.0, 0)
        """Proposals, expected first acceptances, their variance, first acceptances."""

    @property
    def proposals(self) -> float:
        """Proposals that the first position's rate rests on."""
        return self._reached[0] if self._reached else 0.0

    def add(self, proposed: int, accepted: int) -> None:
        """Count a proposal that was verified."""
        self._watch(accepted > 0)
        reached, taken = self._reached, self._accepted
        while len(reached) < proposed:
            reached.append(0.0)
            taken.append(0.0)
        for position in range(accepted):
            reached[position] += 1.0
            taken[position] += 1.0
        if accepted < proposed:
            reached[accepted] += 1.0
        if proposed and reached[0] > 2 * MEMORY:
            self._forget(MEMORY)

    def _watch(self, is_accepted: bool) -> None:
        """Forget what was long ago when the newest proposals are clearly unlike it: the text or the draft has
        changed."""
        count, expected, variance, accepted = self._window
        rate = self._first_rate
        if self._reached:
            rate = (self._accepted[0] + DOUBT * rate) / (self._reached[0] + DOUBT)
        count, expected, accepted = count + 1, expected + rate, accepted + is_accepted
        variance += rate * (1.0 - rate)
        if abs(accepted - expected) > CHANGE * math.sqrt(variance) and count > 2:
            self._forget(count)
            self._window = (0, 0.0, 0.0, 0)
        else:
            self._window = (0, 0.0, 0.0, 0) if count >= WINDOW else (count, expected, variance, accepted)

    def _forget(self, kept: float) -> None:
        if self.proposals > kept:
            share = kept / self.proposals
            self._reached = [count * share for count in self._reached]
            self._accepted = [count * share for count in self._accepted]

    def rates(self, count: int, deviations: float = 0.0) -> list[float]:
        """The conditional acceptance rate at each of the first `count` positions, or what it may be at best.

        Args:
            count: Positions.
            deviations: Adds so many standard deviations of each rate's distribution.
        """
        rate, rates = self._first_rate, []
        for position in range(count):
            weight = DOUBT
            if position < len(self._reached):
                weight += self._reached[position]
                rate = (self._accepted[position] + DOUBT * rate) / weight
            spread = math.sqrt(rate * (1.0 - rate) / (1.0 + weight)) if deviations else 0.0
            rates.append(min(rate + deviations * spread, 1.0))
        return rates


class RequestAcceptance:
    """Compares a request's own acceptance with that of all requests."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._expected = self._accepted = float(WINDOW)

    def add(self, proposed: int, accepted: int, rates: Sequence[float]) -> None:
        """Count a proposal, beside the rates that all requests have."""
        if proposed <= len(rates):
            self._expected += sum(rates[: min(accepted + 1, proposed)])
            self._accepted += accepted

    def forget(self) -> None:
        """Halve the counts: otherwise a request that does not draft would never try again."""
        self._expected = (self._expected + WINDOW) / 2
        self._accepted = (self._accepted + WINDOW) / 2

    @property
    def scale(self) -> float:
        """Factor of the request's acceptance over that of all requests."""
        return self._accepted / self._expected


def expected_tokens(rates: Sequence[float], scale: float = 1.0) -> list[float]:
    """Expected tokens of a round, the target's own included, for proposals of 0, 1, ..., len(rates) tokens.

    1 + E[accepted(K)], where a token counts when all before it were accepted (Leviathan et al. 2023, equation 1, with a
    rate for each position).
    """
    tokens, product, total = [1.0], 1.0, 1.0
    for rate in rates:
        product *= min(rate * scale, 1.0)
        total += product
        tokens.append(total)
    return tokens
