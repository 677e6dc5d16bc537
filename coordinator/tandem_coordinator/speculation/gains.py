"""Gain model: how many proposed tokens are accepted, by position; shared by requests of a kind, refined by each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FIRST_RATE = 0.6
"""Acceptance at the first position before any was measured: about that of a draft of the same family (demo pair 0.55
to 0.7), and enough that drafting is begun."""
DOUBT = 8.0
"""Weight of the prior, in proposals. In simulations 2 loses 1.5 % of the first 100 rounds by giving up too early."""
MEMORY = 300.0
"""Proposals that rates average over: their standard error is then 3 %; choices that differ by less count as alike."""
CHANGE = 3.5
"""Standard deviations by which a window of proposals must differ for older ones to be forgotten: by chance one window
in 2000 does."""
WINDOW = 24
"""Proposals in such a window, at most: enough to tell a rate of 0.4 from 0.8."""

FIRST_MISSES = (0.7, 0.83, 0.83, 0.75, 0.72)
"""Before any was measured, the rates at which the outcome of a verification is not the likeliest one; nor the second;
nor among 4, 8 and 16, given each time that it was not among half as many: a 2.6 M draft of a 25.7 M target."""
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
    return RequestKind(draft, rule, sum(temperature > end for end in TEMPERATURE_RANGES))


def temperature_words(temperature_range: int) -> str:
    """A temperature range in words, for instance "0.85-1.15"."""
    ends = TEMPERATURE_RANGES
    if temperature_range == 0:
        return "0"
    lower = f"{ends[temperature_range - 1]:g}"
    return f"{lower}-{ends[temperature_range]:g}" if temperature_range < len(ends) else f"above {lower}"


class ConditionalRates:
    """Rates of a chain of events, each given that all before it happened: Beta distributions that forget.

    For acceptance, the events are the proposed tokens, each accepted if all before it were.
    """

    __slots__ = ("_happened", "_prior", "_reached", "_window")

    def __init__(self, prior: Sequence[float] = (FIRST_RATE,)) -> None:
        """
        Args:
            prior: Rates before anything was counted. Behind the last of them it is the rate of the event before.
        """
        self._reached: list[float] = []
        self._happened: list[float] = []
        self._prior = prior
        self._window = (0, 0.0, 0.0, 0)
        """Chains, how often the first event was expected in them, the variance, how often it happened."""

    @property
    def count(self) -> float:
        """Chains that the first rate rests on."""
        return self._reached[0] if self._reached else 0.0

    def add(self, length: int, happened: int) -> None:
        """Count a chain of so many events, of which the first ones happened and the next one did not."""
        self._watch(happened > 0)
        while len(self._reached) < length:
            self._reached.append(0.0)
            self._happened.append(0.0)
        for index in range(happened):
            self._reached[index] += 1.0
            self._happened[index] += 1.0
        if happened < length:
            self._reached[happened] += 1.0
        if self.count > 2 * MEMORY:
            self._forget(MEMORY)

    def _watch(self, has_happened: bool) -> None:
        """Forget what was long ago when the newest are clearly unlike it: the text or the draft has changed."""
        count, expected, variance, happened = self._window
        rate = self.rates(1)[0]
        count, expected, happened = count + 1, expected + rate, happened + has_happened
        variance += rate * (1.0 - rate)
        has_changed = abs(happened - expected) > CHANGE * math.sqrt(variance) and count > 2
        if has_changed:
            self._forget(count)
        is_over = has_changed or count >= WINDOW
        self._window = (0, 0.0, 0.0, 0) if is_over else (count, expected, variance, happened)

    def _forget(self, kept: float) -> None:
        share = min(kept / max(self.count, 1.0), 1.0)
        self._reached = [count * share for count in self._reached]
        self._happened = [count * share for count in self._happened]

    def rates(self, count: int, deviations: float = 0.0) -> list[float]:
        """The first `count` rates, or what they may be at best: so many standard deviations higher."""
        rate, rates = 0.0, []
        for index in range(count):
            rate = self._prior[index] if index < len(self._prior) else rate
            weight = DOUBT
            if index < len(self._reached):
                weight += self._reached[index]
                rate = (self._happened[index] + DOUBT * rate) / weight
            spread = math.sqrt(rate * (1.0 - rate) / (1.0 + weight)) if deviations else 0.0
            rates.append(min(max(rate + deviations * spread, 0.0), 1.0))
        return rates


class GainModel:
    """Acceptance rates learned from the proposals for one kind of request."""

    def __init__(self, first_rate: float = FIRST_RATE) -> None:
        self.acceptance = ConditionalRates([first_rate])
        self._misses = ConditionalRates(FIRST_MISSES)

    def add_outcome(self, rank: int | None, outcomes: int) -> None:
        """Count a round: the place of the outcome that came, None for a miss, among those that were drafted for."""
        tried = outcomes.bit_length()
        if rank is None:
            self._misses.add(tried, tried)
        else:
            self._misses.add(max(tried, rank.bit_length() + 1), rank.bit_length())

    def hit_rate(self, outcomes: int) -> float:
        """Share of rounds whose outcome is among so many."""
        return 1.0 - math.prod(self._misses.rates(outcomes.bit_length()))


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
