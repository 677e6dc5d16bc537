"""Results of rounds, for tests of their receivers."""

from __future__ import annotations

from tandem.model.types import StepCost
from tandem_coordinator.stats.rounds import RoundCost, RoundResult


def round_result(
    proposed: int,
    accepted: int,
    cost: RoundCost | None = None,
    *,
    draft: str | None = None,
    target: str | None = None,
    awaited: bool = False,
    rank: int | None = None,
    branch_step: StepCost | None = None,
    saved: float = 0.0,
) -> RoundResult:
    """A round that committed one token more than it accepted."""
    return RoundResult(
        proposed,
        accepted,
        accepted + 1,
        cost=cost,
        is_drafted=proposed > 0,
        draft_address=draft,
        target_address=target,
        awaited_outcome=awaited,
        outcome_rank=rank,
        branch_step=branch_step,
        saved_seconds=saved,
    )
