"""Rounds that have ended, for tests of their listeners."""

from __future__ import annotations

from tandem.model.types import StepCost
from tandem_coordinator.stats.rounds import RoundCost, RoundEnded, RoundTimes


def round_ended(
    proposed: int,
    accepted: int,
    cost: RoundCost | None = None,
    *,
    draft: str | None = None,
    target: str | None = None,
    awaited: bool = False,
    rank: int | None = None,
    outcome_step: StepCost | None = None,
    saved: float = 0.0,
) -> RoundEnded:
    """A round that committed one token more than it accepted."""
    return RoundEnded(
        proposed,
        accepted,
        accepted + 1,
        times=RoundTimes(0.0, 0.0, 0.0, 0.0, 0.0 if cost is None else cost.seconds),
        cost=cost,
        is_drafted=proposed > 0,
        draft_address=draft,
        target_address=target,
        awaited_outcome=awaited,
        outcome_rank=rank,
        outcome_step=outcome_step,
        saved_seconds=saved,
    )
