"""Speed-up of speculation at each proposal length, by the controller's formula, and capacity of a fleet. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.speculation.gains import expected_tokens
from tandem.speculation_state import SpeculationDecision

FloatArray: TypeAlias = NDArray[np.float64]

MAX_TOKENS = 16
"""Longest proposal that a plan looks at."""
HELP = 1.5
"""A remedy is judged by the gain of a draft that is this many times as fast, as near, or as good."""
PER_8_ROWS = 0.1
"""Share by which a step takes longer for each 8 rows beyond the first: the GPUs of the published measurements spend
most of a step on reading weights."""
HIT_RATE = 0.75
"""Share of rounds whose outcome a draft has prepared that works ahead, with 16 branches and four tokens."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times and acceptance of a pair."""

    verify_seconds: float
    """Seconds of a target step with one row."""
    draft_step_seconds: float
    """Seconds of a draft step with one row."""
    acceptance_rates: tuple[float, ...]
    """Conditional acceptance at each position; the last one holds for all positions after it."""
    round_trip_seconds: float = 0.0
    """Seconds of one message to a service and its answer."""
    per_8_rows: float = PER_8_ROWS

    def verification_seconds(self, rows: Any) -> Any:
        """Seconds of a target step with so many rows, a number or an array."""
        return self.verify_seconds * (1.0 + self.per_8_rows * (rows - 1.0) / 8.0)

    def rounds(self, batch: int, max_tokens: int = MAX_TOKENS) -> Rounds:
        """The rounds of so many requests at once."""
        proposed = np.arange(max_tokens + 1.0)
        step = self.draft_step_seconds * (1.0 + self.per_8_rows * (batch - 1) / 8.0)
        return Rounds(
            verify=self.verification_seconds(batch * (proposed + 1.0)),
            draft=proposed * step,
            messages=self.round_trip_seconds * np.where(proposed > 0, 2.0, 1.0),
            acceptance_rates=_extended(self.acceptance_rates, max_tokens),
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of the parts of a round at one load, by the number of tokens that it proposes, each of shape [K + 1]."""

    verify: FloatArray
    draft: FloatArray
    messages: FloatArray
    acceptance_rates: Sequence[float]
    """Conditional acceptance at each of the K positions."""
    mapping: str = ""
    """Coverage of the vocabulary mapping, for a draft with another tokenizer."""

    @property
    def tokens(self) -> FloatArray:
        """Expected tokens of a round, shape [K + 1]."""
        return np.array(expected_tokens(self.acceptance_rates))

    @property
    def seconds(self) -> FloatArray:
        """Seconds of a round, shape [K + 1]."""
        return self.verify + self.draft + self.messages

    @property
    def speeds(self) -> FloatArray:
        """Tokens per second of a request, shape [K + 1]."""
        return self.tokens / self.seconds


def _extended(rates: Sequence[float], count: int) -> list[float]:
    """The first `count` rates, where the last one is known to hold for all after it."""
    known = rates[:count]
    return [*known, *[rates[-1]] * (count - len(known))]


def measured_rounds(decision: SpeculationDecision, mapping: str = "") -> Rounds:
    """Measurements of a running cluster at one load."""
    proposed = len(decision.round_seconds) - 1
    draft = np.arange(proposed + 1.0) * decision.draft_step_seconds
    messages = np.array([decision.alone_message_seconds, *[decision.message_seconds] * proposed])
    verify = np.maximum(decision.round_seconds - draft - messages, 1e-9)
    return Rounds(verify, draft, messages, _extended(decision.acceptance_rates, proposed), mapping)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One proposal length. Seconds and speed-up over the target alone include the wire unless the name says more."""

    tokens: int
    """K."""
    tokens_per_pass: float
    """Expected tokens per round, including the target's own."""
    round_seconds: float
    speedup: float
    speedup_without_wire: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """An improvement."""

    remedy: str
    speedup: float
    """Tokens per second with it, over those of today's target alone."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Advice for one number of requests."""

    of: str
    """What it is about."""
    batch: int
    best_tokens: int
    """0: the target alone."""
    best_speedup: float
    break_even_acceptance: float | None
    """Lowest acceptance rate, the same at every position, at which any length pays; None where none does."""
    remedies: tuple[Remedy, ...]
    """The most helpful first."""
    mapping: str
    """See `Rounds.mapping`."""
    lengths: tuple[PlanRow, ...]


def plan(rounds: Rounds, batch: int, of: str = "") -> BatchPlan:
    """The table for one number of requests at once."""
    speedups = rounds.speeds / rounds.speeds[0]
    local = replace(rounds, messages=np.zeros_like(rounds.messages)).speeds
    columns = (rounds.tokens, rounds.seconds, speedups, local / local[0])
    rows = zip(range(len(speedups)), *(column.tolist() for column in columns), strict=True)
    best = int(speedups.argmax())
    return BatchPlan(
        of=of,
        batch=batch,
        best_tokens=best,
        best_speedup=float(speedups[best]),
        break_even_acceptance=break_even(rounds),
        remedies=remedies(rounds),
        mapping=rounds.mapping,
        lengths=tuple(PlanRow(*row) for row in rows),
    )


def break_even(rounds: Rounds) -> float | None:
    """The acceptance, the same at every position, from which drafting makes more tokens than the target alone."""

    def pays(millionths: int) -> bool:
        same = [millionths / 1e6] * len(rounds.acceptance_rates)
        speeds = replace(rounds, acceptance_rates=same).speeds
        return bool(speeds.max() > speeds[0])

    first = bisect_right(range(1_000_001), False, key=pays)
    return first / 1e6 if first <= 1_000_000 else None


def remedies(rounds: Rounds) -> tuple[Remedy, ...]:
    """Improvements, the most helpful first."""
    better = [1.0 - (1.0 - rate) / HELP for rate in rounds.acceptance_rates]
    # With drafting ahead a hit costs a verification and its two messages.
    hit = np.maximum(rounds.verify, rounds.draft) + rounds.messages / 2.0
    ahead = rounds.tokens / (HIT_RATE * hit + (1.0 - HIT_RATE) * rounds.seconds)
    speeds = {
        f"a draft {HELP:g} times as fast": replace(rounds, draft=rounds.draft / HELP).speeds,
        f"round trips {HELP:g} times as short": replace(rounds, messages=rounds.messages / HELP).speeds,
        f"a draft with {1 - 1 / HELP:.0%} fewer rejections": replace(rounds, acceptance_rates=better).speeds,
        f"drafting ahead with {HIT_RATE:.0%} hits": np.append(rounds.speeds[0], ahead[1:]),
    }
    found = [Remedy(name, float(each.max() / rounds.speeds[0])) for name, each in speeds.items()]
    return tuple(sorted(found, key=lambda remedy: -remedy.speedup))


# ---- how many clients targets serve when their drafts are elsewhere, and how many drafts they need
#
# A target whose draft is on the same device is busy for t_verify + K x t_draft in each round; with the draft elsewhere
# it is busy for t_verify alone. So a saturated target, whose steps take as much longer as they have more rows, serves
# 1 + K x t_draft / t_verify times as many clients at the same rate (arXiv 2606.25091). `period_seconds` adds what the
# law leaves out: groups of clients that take turns, the draft's own queue, and the way between them.


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
        seconds: float = self.times.verification_seconds(max(batch, 1.0) * (self.proposed + 1))
        return seconds

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a client's round."""
        return expected_tokens(_extended(self.times.acceptance_rates, self.proposed))[-1]

    def together_seconds(self, batch: float) -> float:
        """Seconds of a round where a target and its draft take turns on one device, with so many clients."""
        return self.verify_seconds(batch) + self.proposed * self.draft_step_seconds(batch)

    def period_seconds(self, clients: int, drafts: int | None = None) -> float:
        """Seconds of a client's round with drafts elsewhere, for the clients of all targets together.

        A target's clients are in groups of which one is verified while the others draft. Who comes back while a step
        runs waits for its end, so the number of groups is whole. With 0 drafts the targets go on alone.
        """
        drafts = self.drafts if drafts is None else drafts
        each = clients / self.targets
        if drafts == 0:
            step: float = self.times.verification_seconds(max(each, 1.0))
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
    law = together / fleet.verify_seconds(batch)
    clients = bisect_right(range(1, 1 << 20), together, key=fleet.period_seconds)
    lost = fleet.period_seconds(max(clients, 1), fleet.drafts - 1)
    kept = fleet.period_seconds(max(clients, 1))
    lawful = max(round(law * together_clients), 1)
    numbers = range(1, min(4096, lawful) + 1)
    enough = (each for each in numbers if fleet.period_seconds(lawful, each) <= together / 0.9)
    return FleetPlan(
        proposed=fleet.proposed,
        together_clients=together_clients,
        rate=fleet.tokens_per_round / together,
        law=law,
        clients=clients,
        gain=clients / together_clients,
        drafts_needed=next(enough, None),
        rate_with_one_less=fleet.tokens_per_round / lost,
        lost_share=max(0.0, 1.0 - kept / lost),
    )
