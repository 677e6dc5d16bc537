"""Speculation statistics: the counts, and the rates that MAX and vLLM derive from them.

Both engines report an acceptance length and acceptance per position, and mean different things. Here:

- The acceptance length is MAX's: accepted tokens for each verification. Tokens per pass are one more, for the token
  that the target supplies itself; vLLM calls that the mean acceptance length. A verification without a proposal
  counts in both.
- The rate at a position is cumulative (of all tokens proposed there, how many were accepted; never higher than
  at the position before) or conditional (of those whose predecessors were all accepted).
"""

from __future__ import annotations

from collections import defaultdict

from coordinator.stats.ahead import (
    add_outcomes,
    describe_ahead,
    hit_rate,
    outcomes_since,
)
from coordinator.stats.rounds import RoundResult
from coordinator.stats.tally import RoundTally
from tandem.speculation_state import SpeculationState
from tandem.types import PositionStats, SpeculationStats


def add(total: SpeculationStats, stats: SpeculationStats) -> None:
    """Count in `total` everything that `stats` counted."""
    total.rounds += stats.rounds
    total.drafted += stats.drafted
    total.accepted += stats.accepted
    _extend(total, len(stats.positions))
    for position, other in zip(total.positions, stats.positions, strict=False):
        position.drafted += other.drafted
        position.reached += other.reached
        position.accepted += other.accepted
    add_outcomes(total.ahead, stats.ahead)


def since(stats: SpeculationStats, earlier: SpeculationStats) -> SpeculationStats:
    """Counts added since `earlier`."""
    difference = SpeculationStats(
        rounds=stats.rounds - earlier.rounds,
        drafted=stats.drafted - earlier.drafted,
        accepted=stats.accepted - earlier.accepted,
        ahead=outcomes_since(stats.ahead, earlier.ahead),
    )
    _extend(difference, len(stats.positions))
    for index, position in enumerate(difference.positions):
        now = stats.positions[index]
        before = earlier.positions[index] if index < len(earlier.positions) else PositionStats()
        position.drafted = now.drafted - before.drafted
        position.reached = now.reached - before.reached
        position.accepted = now.accepted - before.accepted
    return difference


class CumulativeStats:
    """Speculation statistics since the start, per acceptance rule."""

    def __init__(self) -> None:
        self._by_rule: defaultdict[str, RoundTally] = defaultdict(RoundTally)

    def record(self, rule: str, result: RoundResult) -> None:
        """Count a round under `rule`."""
        self._by_rule[rule].add_result(result)

    def snapshot(self) -> tuple[SpeculationStats, dict[str, SpeculationStats]]:
        """Statistics in total and per rule, as they are now."""
        total, by_rule = SpeculationStats(), {}
        for rule, tally in self._by_rule.items():
            stats = by_rule[rule] = SpeculationStats()
            add(stats, tally.stats())
            add(total, stats)
        return total, by_rule


def proposals(stats: SpeculationStats) -> int:
    """Verifications that had a proposal."""
    return stats.positions[0].drafted if stats.positions else 0


def acceptance_rate(stats: SpeculationStats) -> float:
    """Share of the proposed tokens that were accepted; 0 when none was proposed."""
    return _share(stats.accepted, stats.drafted)


def acceptance_length(stats: SpeculationStats) -> float:
    """MAX's acceptance length: accepted tokens for each verification."""
    return _share(stats.accepted, stats.rounds)


def tokens_per_pass(stats: SpeculationStats) -> float:
    """Tokens for each verification, including the target's own: vLLM's mean acceptance length."""
    return 1.0 + acceptance_length(stats)


def cumulative_rates(stats: SpeculationStats) -> list[float]:
    """For each position: of the tokens proposed there, the share that was accepted."""
    return [_share(position.accepted, position.drafted) for position in stats.positions]


def conditional_rates(stats: SpeculationStats) -> list[float]:
    """For each position: of the tokens whose predecessors were all accepted, the share that was accepted."""
    return [_share(position.accepted, position.reached) for position in stats.positions]


def describe(stats: SpeculationStats) -> dict[str, object]:
    """All statistics by name, of types that JSON has. `acceptance_length` is MAX's; `tokens_per_pass` is one more."""
    return {
        "rounds": stats.rounds,
        "proposals": proposals(stats),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": round(acceptance_rate(stats), 6),
        "acceptance_length": round(acceptance_length(stats), 6),
        "tokens_per_pass": round(tokens_per_pass(stats), 6),
        "per_position": {
            "cumulative": _rounded(cumulative_rates(stats)),
            "conditional": _rounded(conditional_rates(stats)),
        },
        "ahead": describe_ahead(stats.ahead),
    }


def describe_with_state(stats: SpeculationStats, state: SpeculationState | None) -> dict[str, object]:
    """The same as JSON, with the speculation state under `state` where it is known."""
    return {**describe(stats), **({} if state is None else {"state": state.as_dict()})}


def log_line(stats: SpeculationStats) -> str:
    """The statistics as MAX's scheduler logs them; empty when nothing was proposed.

    The acceptance length is MAX's, beside the longest possible one, and the rates are cumulative. What drafting ahead
    did follows, where it did anything.
    """
    if not stats.drafted:
        return ""
    rates = ", ".join(f"{rate:.0%}" for rate in cumulative_rates(stats))
    line = (
        f"Draft Tokens: {stats.accepted}/{stats.drafted} ({acceptance_rate(stats):.2%}) accepted, "
        f"Acceptance Len: {acceptance_length(stats):.2f} / {len(stats.positions)} toks, "
        f"Per-Pos: [{rates}] |"
    )
    ahead = stats.ahead
    if not ahead.awaited:
        return line
    hits = f"{ahead.hits}/{ahead.awaited} ({hit_rate(ahead):.2%})"
    return f"{line} Drafted Ahead: {hits} hits, {ahead.saved_seconds:.2f} s saved |"


def _extend(stats: SpeculationStats, position_count: int) -> None:
    while len(stats.positions) < position_count:
        stats.positions.append(PositionStats())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 6) for rate in rates]
