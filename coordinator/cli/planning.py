"""Speed-up of speculation at each proposal length, by the controller's formula, and capacity of a fleet. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from coordinator.speculation.gains import expected_tokens
from tandem.speculation_state import SpeculationDecision

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
    verify_by_length: tuple[float, ...] = ()
    """Seconds of a verification of 0, 1, ... proposed tokens, where a cluster has measured them at one load.
    `draft_step_seconds` then belongs to the same load."""
    mapping: str = ""
    """Coverage of the vocabulary mapping, for a draft with another tokenizer."""
    alone_trips: float = 1.0
    """Round trips of a round without a proposal: none where the target begins the next one before it is asked."""

    def verification_seconds(self, batch: int, proposed: int) -> float:
        """Seconds of a target step in which each sequence has so many proposed tokens."""
        if self.verify_by_length:
            return self.verify_by_length[proposed]
        return self.step_seconds(self.verify_seconds, batch * (proposed + 1))

    def drafting_seconds(self, batch: int, proposed: int) -> float:
        """Seconds of the draft's steps for a proposal."""
        if self.verify_by_length:
            return proposed * self.draft_step_seconds
        return proposed * self.step_seconds(self.draft_step_seconds, batch)

    def rates(self, count: int) -> list[float]:
        """Acceptance at each of the first `count` positions."""
        known = self.acceptance_rates[:count]
        return [*known, *[self.acceptance_rates[-1]] * (count - len(known))]

    def step_seconds(self, seconds: float, rows: float) -> float:
        """Seconds of a step with so many rows."""
        return seconds * (1.0 + self.per_8_rows * (rows - 1) / 8.0)

    def round_seconds(self, batch: int, proposed: int, *, is_remote: bool = True) -> float:
        """Seconds of a round in which each of `batch` sequences proposes so many tokens, with or without the wire."""
        messages = self.round_trip_seconds * (2 if proposed else self.alone_trips) if is_remote else 0.0
        return self.verification_seconds(batch, proposed) + self.drafting_seconds(batch, proposed) + messages

    def speedup(self, batch: int, proposed: int, *, is_remote: bool = True) -> float:
        """Tokens per second over those of the target alone. Without the wire, both models share one process."""
        tokens = expected_tokens(self.rates(proposed))[-1]
        alone = self.round_seconds(batch, 0, is_remote=is_remote)
        return tokens * alone / self.round_seconds(batch, proposed, is_remote=is_remote)

    def ahead_speedup(self, batch: int, proposed: int) -> float:
        """Speed-up with drafting ahead, where a hit costs a verification and its two messages."""
        tokens = expected_tokens(self.rates(proposed))[-1]
        alone = self.round_seconds(batch, 0)
        verify, draft = self.verification_seconds(batch, proposed), self.drafting_seconds(batch, proposed)
        hit = max(verify, draft) + self.round_trip_seconds
        mean = HIT_RATE * hit + (1.0 - HIT_RATE) * self.round_seconds(batch, proposed)
        return tokens * alone / mean


def measured_times(decision: SpeculationDecision) -> StepTimes:
    """Measurements of a running cluster at one load."""
    step, messages, alone = (
        decision.draft_step_seconds,
        decision.message_seconds,
        decision.alone_message_seconds,
    )
    verify = tuple(
        max(seconds - proposed * step - (messages if proposed else alone), 1e-9)
        for proposed, seconds in enumerate(decision.round_seconds)
    )
    trip = messages / 2.0
    return StepTimes(
        *(verify[0], step, decision.acceptance_rates, trip),
        alone_trips=alone / trip if trip else 1.0,
        verify_by_length=verify,
    )


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One proposal length."""

    tokens: int
    """K."""
    tokens_per_pass: float
    """Expected tokens per round, including the target's own."""
    round_seconds: float
    """Seconds of a round, including the wire."""
    speedup: float
    """Speed-up over the target alone, including the wire."""
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
    """See `StepTimes.mapping`."""
    lengths: tuple[PlanRow, ...]


def plan(times: StepTimes, batch: int, max_tokens: int = MAX_TOKENS, of: str = "") -> BatchPlan:
    """The table for one number of requests at once."""
    rows = tuple(
        PlanRow(
            tokens,
            expected_tokens(times.rates(tokens))[-1],
            times.round_seconds(batch, tokens),
            times.speedup(batch, tokens),
            times.speedup(batch, tokens, is_remote=False),
        )
        for tokens in range(max_tokens + 1)
    )
    best = max(rows, key=lambda row: row.speedup)
    pays_from, helps = break_even(times, batch, max_tokens), remedies(times, batch, max_tokens)
    return BatchPlan(of, batch, best.tokens, best.speedup, pays_from, helps, times.mapping, rows)


def best_speedup(times: StepTimes, batch: int, max_tokens: int) -> float:
    """The highest speed-up over all lengths, 0 included."""
    return max(times.speedup(batch, tokens) for tokens in range(max_tokens + 1))


def break_even(times: StepTimes, batch: int, max_tokens: int) -> float | None:
    """The acceptance, the same at every position, from which drafting makes more tokens than the target alone."""

    def pays(rate: float) -> bool:
        return best_speedup(replace(times, acceptance_rates=(rate,)), batch, max_tokens) > 1.0

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2.0
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def remedies(times: StepTimes, batch: int, max_tokens: int) -> tuple[Remedy, ...]:
    """Improvements, the most helpful first."""
    better = tuple(1.0 - (1.0 - rate) / HELP for rate in times.acceptance_rates)
    trip = times.round_trip_seconds / HELP
    changed = {
        f"a draft {HELP:g} times as fast": replace(times, draft_step_seconds=times.draft_step_seconds / HELP),
        f"round trips {HELP:g} times as short": replace(times, round_trip_seconds=trip),
        f"a draft with {1 - 1 / HELP:.0%} fewer rejections": replace(times, acceptance_rates=better),
    }
    today = times.round_seconds(batch, 0)
    found = [
        Remedy(name, best_speedup(other, batch, max_tokens) * today / other.round_seconds(batch, 0))
        for name, other in changed.items()
    ]
    ahead = max(times.ahead_speedup(batch, tokens) for tokens in range(1, max_tokens + 1))
    found.append(Remedy(f"drafting ahead with {HIT_RATE:.0%} hits", max(1.0, ahead)))
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
        rows = max(batch, 1.0) * (self.proposed + 1)
        return self.times.step_seconds(self.times.verify_seconds, rows)

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
            step = self.times.step_seconds(self.times.verify_seconds, max(each, 1.0))
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
        return bisect_right(range(1, 1 << 20), seconds, key=self.period_seconds)

    def drafts_for(self, clients: int, seconds: float) -> int | None:
        """The fewest drafts with which so many clients have rounds of at most so many seconds; None: no number does."""
        enough = (
            drafts
            for drafts in range(1, min(4096, clients) + 1)
            if self.period_seconds(clients, drafts) <= seconds
        )
        return next(enough, None)


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
