"""`residual` for many rounds at once: `residual.accept` in numpy over all of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rejection.together.joint_rows import JointRows, Kept, decide
from coordinator.rejection.together.rounds import Round
from tandem.types import Acceptance


def accept_many(rounds: Sequence[Round]) -> list[Acceptance | None]:
    """Decide each round as `residual.accept` does; see `joint_rows.decide`."""
    return decide(rounds, _keep)


def _keep(joint: JointRows) -> list[Kept | None]:
    """The tokens before each round's first rejected one."""
    # Strictly below: a token of probability zero must not pass when both sides are 0.
    is_kept = (joint.uniforms < joint.ratios).tolist()
    is_prob = (joint.token_probs >= 0.0).tolist()
    kept: list[Kept | None] = []
    start = 0
    for count in joint.counts:
        own = is_kept[start : start + count]
        length = own.index(False) if False in own else count
        kept.append((length, 1.0) if all(is_prob[start : start + count]) else None)
        start += count
    return kept
