"""What speculation did: counting it, and the figures that MAX and vLLM make of the counts.

Both engines speak of an acceptance length and of acceptance per position, and mean different things:

- MAX's acceptance length counts the accepted tokens of a verification, vLLM's mean acceptance length one more,
  for the token that the target supplies itself. A verification without a proposal counts in both.
- The rate at a position is cumulative (of all tokens proposed there, how many were accepted; never higher than
  at the position before) or conditional (of those whose predecessors were all accepted).
"""

from __future__ import annotations

from collections import defaultdict

from tandem.types import PositionFigures, SpeculationFigures


def record_round(figures: SpeculationFigures, drafted: int, accepted: int) -> None:
    """Count one verification, with or without a proposal.

    Args:
        figures: What to add to.
        drafted: Tokens of the proposal.
        accepted: How many of them were kept, from the first on.
    """
    figures.rounds += 1
    figures.drafted += drafted
    figures.accepted += accepted
    _extend(figures, drafted)
    for index in range(drafted):
        position = figures.positions[index]
        position.drafted += 1
        position.reached += index <= accepted
        position.accepted += index < accepted


def add(total: SpeculationFigures, figures: SpeculationFigures) -> None:
    """Count in `total` everything that `figures` counted."""
    total.rounds += figures.rounds
    total.drafted += figures.drafted
    total.accepted += figures.accepted
    _extend(total, len(figures.positions))
    for position, other in zip(total.positions, figures.positions, strict=False):
        position.drafted += other.drafted
        position.reached += other.reached
        position.accepted += other.accepted


def since(figures: SpeculationFigures, earlier: SpeculationFigures) -> SpeculationFigures:
    """What was counted after `figures` stood as `earlier` stands."""
    difference = SpeculationFigures(
        rounds=figures.rounds - earlier.rounds,
        drafted=figures.drafted - earlier.drafted,
        accepted=figures.accepted - earlier.accepted,
    )
    _extend(difference, len(figures.positions))
    for index, position in enumerate(difference.positions):
        now = figures.positions[index]
        before = earlier.positions[index] if index < len(earlier.positions) else PositionFigures()
        position.drafted = now.drafted - before.drafted
        position.reached = now.reached - before.reached
        position.accepted = now.accepted - before.accepted
    return difference


class CumulativeFigures:
    """What speculation did since the start, in all and for each acceptance rule."""

    def __init__(self) -> None:
        self.total = SpeculationFigures()
        self.by_rule: defaultdict[str, SpeculationFigures] = defaultdict(SpeculationFigures)

    def add(self, rule: str, figures: SpeculationFigures) -> None:
        """Count a finished request that ran under `rule`."""
        add(self.total, figures)
        add(self.by_rule[rule], figures)


def proposals(figures: SpeculationFigures) -> int:
    """Verifications that had a proposal."""
    return figures.positions[0].drafted if figures.positions else 0


def acceptance_rate(figures: SpeculationFigures) -> float:
    """Share of the proposed tokens that were accepted; 0 when none was proposed."""
    return _share(figures.accepted, figures.drafted)


def accepted_per_verification(figures: SpeculationFigures) -> float:
    """MAX's acceptance length: accepted tokens for each verification."""
    return _share(figures.accepted, figures.rounds)


def mean_acceptance_length(figures: SpeculationFigures) -> float:
    """vLLM's: tokens for each verification, the one that the target supplies included."""
    return 1.0 + accepted_per_verification(figures)


def cumulative_rates(figures: SpeculationFigures) -> list[float]:
    """For each position: of the tokens proposed there, the share that was accepted."""
    return [_share(position.accepted, position.drafted) for position in figures.positions]


def conditional_rates(figures: SpeculationFigures) -> list[float]:
    """For each position: of the tokens whose predecessors were all accepted, the share that was accepted."""
    return [_share(position.accepted, position.reached) for position in figures.positions]


def describe(figures: SpeculationFigures) -> dict[str, object]:
    """All figures by name, of types that JSON has. `acceptance_length` is MAX's, `mean_acceptance_length` vLLM's."""
    return {
        "rounds": figures.rounds,
        "proposals": proposals(figures),
        "drafted": figures.drafted,
        "accepted": figures.accepted,
        "acceptance_rate": round(acceptance_rate(figures), 6),
        "acceptance_length": round(accepted_per_verification(figures), 6),
        "mean_acceptance_length": round(mean_acceptance_length(figures), 6),
        "per_position": {
            "cumulative": _rounded(cumulative_rates(figures)),
            "conditional": _rounded(conditional_rates(figures)),
        },
    }


def log_line(figures: SpeculationFigures) -> str:
    """The figures as MAX's scheduler logs them; empty when nothing was proposed.

    The acceptance length is MAX's, beside the longest possible one, and the rates are cumulative.
    """
    if not figures.drafted:
        return ""
    rates = ", ".join(f"{rate:.0%}" for rate in cumulative_rates(figures))
    return (
        f"Draft Tokens: {figures.accepted}/{figures.drafted} ({acceptance_rate(figures):.2%}) accepted, "
        f"Acceptance Len: {accepted_per_verification(figures):.2f} / {len(figures.positions)} toks, "
        f"Per-Pos: [{rates}] |"
    )


def _extend(figures: SpeculationFigures, position_count: int) -> None:
    while len(figures.positions) < position_count:
        figures.positions.append(PositionFigures())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 6) for rate in rates]
