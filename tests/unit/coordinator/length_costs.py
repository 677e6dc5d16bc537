"""What rounds take and give on machines of three kinds, and requests that run on them side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from coordinator.restraint import Restraint

K = 4


@dataclass(frozen=True)
class Cost:
    """Of a round."""

    acceptance: float
    """Probability that a proposed token is accepted, given that all before it were."""
    seconds: Callable[[int], float]
    """Of a round that proposes so many."""

    def accepted(self, proposed: int, random: Random) -> int:
        """Tokens of one proposal."""
        return next((i for i in range(proposed) if random.random() >= self.acceptance), proposed)

    def rate(self, proposed: int) -> float:
        """Expected tokens a second."""
        return sum(self.acceptance**i for i in range(proposed + 1)) / self.seconds(proposed)


COSTLY = Cost(0.6, lambda proposed: 0.03 * (proposed > 0) + 0.07 * proposed + 0.06)
"""As measured on two cores with 16 requests and 200 million parameters: computing is what takes the time, and a
proposal is worth it for no length."""
CHEAP = Cost(0.8, lambda proposed: 0.05 + 0.005 * proposed)
"""Reading the weights is what takes the time."""
SHORT = Cost(0.7, lambda proposed: 0.05 + 0.01 * proposed**2)
"""The first token proposed is nearly free, the others are not."""
WHOLE = Cost(0.85, lambda proposed: 0.05 + (0.06 + 0.005 * proposed) * (proposed > 0))
"""Messages take the time: a few tokens are worse than none, and many are better than both."""


@dataclass
class Machine:
    """Requests that run side by side, a round of each after the other's."""

    load: int
    cost: Cost
    strangers: int = 0
    """Requests that run beside them and follow nothing."""
    noise: float = 0.0
    """Standard deviation of what a round takes, by what it takes."""
    random: Random = field(default_factory=lambda: Random(1))

    def __post_init__(self) -> None:
        self.restraint = Restraint(K, lambda: self.load + self.strangers)
        self.followers = 0

    def run(self, rounds: int) -> list[int]:
        """The lengths of the proposals in so many rounds of all requests."""
        for _ in range(self.load - self.followers):
            self.restraint.join()
            self.restraint.begun()
        for _ in range(self.followers - self.load):
            self.restraint.leave()
        self.followers = self.load
        lengths = []
        for _ in range(rounds):
            lengths.append(length := self.restraint.tokens)
            for _ in range(self.load):
                self.restraint.add(length, *self.round(length))
        return lengths

    def round(self, length: int) -> tuple[int, float]:
        """Tokens accepted in one, and its seconds."""
        slowness = max(0.1, self.random.gauss(1.0, self.noise)) if self.noise else 1.0
        return self.cost.accepted(length, self.random), self.cost.seconds(length) * slowness

    def efficiency(self, lengths: list[int]) -> float:
        """Tokens a second, by those of the best length."""
        seconds = [self.cost.seconds(length) for length in lengths]
        tokens = sum(map(lambda length, time: self.cost.rate(length) * time, lengths, seconds))
        return tokens / sum(seconds) / max(map(self.cost.rate, (0, 1, 2, 4)))
