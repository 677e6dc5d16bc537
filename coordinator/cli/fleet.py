"""How many clients targets serve when their drafts are elsewhere, and how many drafts they need: a model. Pure.

A target whose draft is on the same device is busy for t_verify + K x t_draft in each round; with the draft elsewhere it
is busy for t_verify alone. So a saturated target, whose steps take as much longer as they have more rows, serves
1 + K x t_draft / t_verify times as many clients at the same rate (arXiv 2606.25091). `period_seconds` adds what the law
leaves out: groups of clients that take turns, the draft's own queue, and the way between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.cli.planning import StepTimes
from coordinator.speculation.gains import expected_tokens


def elsewhere_gain(tokens: int, draft_step_seconds: float, verify_seconds: float) -> float:
    """Clients at an equal rate with drafts elsewhere, over those of a saturated target that shares its device.

    Args:
        tokens: Proposed in a round (K).
        draft_step_seconds: Of a draft step (t_draft).
        verify_seconds: Of a verification (t_verify), above 0.
    """
    return 1.0 + tokens * draft_step_seconds / verify_seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """Targets that share drafts."""

    times: StepTimes
    targets: int
    drafts: int
    proposed: int
    """Tokens of a proposal (K), above 0."""
    draft_per_8_rows: float = 0.0
    """Share by which a draft step takes longer for each 8 sequences more."""

    def draft_step_seconds(self, sequences: float) -> float:
        """Seconds of a draft step with so many sequences."""
        return self.times.draft_step_seconds * (1.0 + self.draft_per_8_rows * max(sequences - 1.0, 0.0) / 8.0)

    def verify_seconds(self, batch: float) -> float:
        """Seconds of a target step with so many clients."""
        rows = max(batch, 1.0) * (self.proposed + 1)
        return self.times.verify_seconds * (1.0 + self.times.per_8_rows * (rows - 1.0) / 8.0)

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a client's round."""
        return expected_tokens(self.times.rates(self.proposed))[-1]

    def together_seconds(self, batch: float) -> float:
        """Seconds of a round where a target and its draft take turns on one device, with so many clients."""
        return self.verify_seconds(batch) + self.proposed * self.draft_step_seconds(batch)

    def period_seconds(self, clients: int, drafts: int | None = None) -> float:
        """Seconds of a client's round with drafts elsewhere.

        A target's clients are in groups of which one is verified while the others draft. Who comes back while a step
        runs waits for its end, so the number of groups is whole.

        Args:
            clients: Of all targets together.
            drafts: How many drafts there are; by default the fleet's. 0: the targets go on alone.
        """
        drafts = self.drafts if drafts is None else drafts
        each = clients / self.targets
        if drafts == 0:
            rows = max(each, 1.0)
            step = self.times.verify_seconds * (1.0 + self.times.per_8_rows * (rows - 1.0) / 8.0)
            return (step + self.times.round_trip_seconds) * self.tokens_per_round
        period = self.together_seconds(each)
        for _ in range(16):
            period = 0.5 * (period + self._period(each, clients / drafts, period))
        return period

    def _period(self, of_target: float, of_draft: float, period: float) -> float:
        """A better estimate of the period."""
        step = self.draft_step_seconds(1.0)
        for _ in range(8):
            drafting = min(of_draft, max(1.0, of_draft * self.proposed * step / period))
            step = self.draft_step_seconds(drafting)
        # A proposal begins with the next step: it waits for half of one where the draft is never idle
        wait = 0.5 * step * min(1.0, of_draft * self.proposed * step / period)
        away = self.proposed * step + wait + 2.0 * self.times.round_trip_seconds
        # More would mean that a proposal takes as long as 31 verifications
        return min(
            max(
                groups * self.verify_seconds(of_target / groups),
                self.verify_seconds(of_target / groups) + away,
            )
            for groups in range(1, min(max(math.ceil(of_target), 1), 32) + 1)
        )

    def clients_within(self, seconds: float) -> int:
        """How many clients the fleet serves with rounds of at most so many seconds."""
        return _most(lambda clients: self.period_seconds(clients) <= seconds)

    def drafts_for(self, clients: int, seconds: float, at_most: int = 4096) -> int | None:
        """The fewest drafts with which so many clients have rounds of at most so many seconds; None: no number does."""
        for drafts in range(1, min(at_most, clients) + 1):
            if self.period_seconds(clients, drafts) <= seconds:
                return drafts
        return None


def _most(holds: Callable[[int], bool]) -> int:
    """The largest number for which a condition holds that does not hold for any larger one."""
    if not holds(1):
        return 0
    low = 1
    while low < 1 << 20 and holds(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Clients that a fleet serves, and their rates."""

    proposed: int
    together_clients: int
    """Clients of targets that share their devices with drafts; where the comparison begins."""
    rate: float
    """Tokens per second of each of them."""
    law: float
    """1 + K x t_draft / t_verify at their batch."""
    clients: int
    """Clients at no lower a rate with these drafts elsewhere."""
    gain: float
    """`clients` over `together_clients`."""
    drafts_needed: int | None
    """The fewest drafts that serve the law's clients at 0.9 of the rate; None: no number does."""
    rate_with_one_less: float
    """Tokens per second of each client once a draft is lost, and its clients are with the others."""
    lost_share: float
    """Share of each client's rate that this costs."""


def fleet_plan(fleet: Fleet, together_clients: int) -> FleetPlan:
    """Compare drafts elsewhere with drafts on the targets' devices, at one rate of each client."""
    batch = together_clients / fleet.targets
    together = fleet.together_seconds(batch)
    law = elsewhere_gain(fleet.proposed, fleet.draft_step_seconds(batch), fleet.verify_seconds(batch))
    clients = fleet.clients_within(together)
    lost = fleet.period_seconds(max(clients, 1), fleet.drafts - 1)
    kept = fleet.period_seconds(max(clients, 1))
    return FleetPlan(
        proposed=fleet.proposed,
        together_clients=together_clients,
        rate=fleet.tokens_per_round / together,
        law=law,
        clients=clients,
        gain=clients / together_clients,
        drafts_needed=fleet.drafts_for(max(round(law * together_clients), 1), together / 0.9),
        rate_with_one_less=fleet.tokens_per_round / lost,
        lost_share=max(0.0, 1.0 - kept / lost),
    )
