"""How many proposed tokens are accepted: by position, shared by all requests, refined by each."""

from __future__ import annotations

FIRST_RATE = 0.6
"""Initial acceptance at the first position: about that of a draft of the same family."""
DOUBT = 4.0
"""Weight of the prior, which is the rate of the position before, in proposals."""
MAX_COUNT = 600.0
"""Counts beyond this are scaled down: acceptance thousands of rounds ago was about other text."""
REQUEST_DOUBT = 24.0
"""Tokens after which a request's own acceptance weighs as much as that of all."""
MIN_SCALE, MAX_SCALE = 0.4, 1.6
MAX_RATE = 0.999


class AcceptanceModel:
    """Conditional acceptance rates: at each position, given that all before it were accepted.

    The counts are those of a Beta distribution. Its prior is the rate of the position before, and for the first
    position the rate under other temperatures, if known.
    """

    __slots__ = ("_accepted", "_first_rate", "_reached")

    def __init__(self, first_rate: float = FIRST_RATE) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._first_rate = first_rate

    @property
    def proposals(self) -> float:
        """How many proposals the first position's rate rests on."""
        return self._reached[0] if self._reached else 0.0

    def add(self, proposed: int, accepted: int) -> None:
        """Count a proposal that was verified."""
        reached, taken = self._reached, self._accepted
        while len(reached) < proposed:
            reached.append(0.0)
            taken.append(0.0)
        for position in range(accepted):
            reached[position] += 1.0
            taken[position] += 1.0
        if accepted < proposed:
            reached[accepted] += 1.0
        if proposed and reached[0] > MAX_COUNT:
            self.forget(MAX_COUNT / 2)

    def forget(self, kept: float) -> None:
        """Limit the weight of the counts to so many proposals."""
        if self.proposals > kept:
            share = kept / self.proposals
            self._reached = [count * share for count in self._reached]
            self._accepted = [count * share for count in self._accepted]

    def rates(self, count: int) -> list[float]:
        """The conditional acceptance rate at each of the first `count` positions."""
        rate, rates = self._first_rate, []
        for position in range(count):
            if position < len(self._reached):
                rate = (self._accepted[position] + DOUBT * rate) / (self._reached[position] + DOUBT)
            rates.append(rate)
        return rates


class RequestAcceptance:
    """How a request's own acceptance compares with that of all."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._expected = REQUEST_DOUBT
        self._accepted = REQUEST_DOUBT

    def add(self, proposed: int, accepted: int, rate_sums: list[float]) -> None:
        """Count a proposal, beside the sums of the rates that all requests have at the positions before each."""
        reached = accepted + 1 if accepted < proposed else proposed
        if reached < len(rate_sums):
            self._expected += rate_sums[reached]
            self._accepted += accepted

    def forget(self) -> None:
        """Halve the counts: otherwise a request that does not draft would never try again."""
        self._expected = (self._expected + REQUEST_DOUBT) / 2
        self._accepted = (self._accepted + REQUEST_DOUBT) / 2

    @property
    def scale(self) -> float:
        """Its rate by that of all."""
        return min(max(self._accepted / max(self._expected, 1e-9), MIN_SCALE), MAX_SCALE)


def expected_tokens(rates: list[float], scale: float = 1.0) -> list[float]:
    """Expected tokens of a round, the target's own included, for proposals of 0, 1, ..., len(rates) tokens.

    1 + E[accepted(K)], where a token counts when all before it were accepted (Leviathan et al. 2023, equation 1, with a
    rate for each position).
    """
    tokens, product, total = [1.0], 1.0, 1.0
    for rate in rates:
        product *= min(rate * scale, MAX_RATE)
        total += product
        tokens.append(total)
    return tokens
