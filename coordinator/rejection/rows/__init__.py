"""One view of what draft and target told, whichever way they told it.

The rules see a target distribution as probabilities on a support, the mass outside it, and one sample from
outside with its probability. That is all exact rejection sampling can ask for when the support covers every token
the draft could have proposed: outside it the draft has no mass, so the residual max(target - draft, 0) is the
target itself, and the winner of its race there is the only token outside that can win the race of all. A dense row
is raced whole, with the same noise as a target service uses, so both kinds of row give the same tokens.
"""

from coordinator.rejection.rows.joint import JointRow, check_rows, draft_support, joint_row
from coordinator.rejection.rows.target import (
    TargetDistribution,
    sample_bonus,
    sample_target,
    target_argmax,
    target_distribution,
)

__all__ = [
    "JointRow",
    "TargetDistribution",
    "check_rows",
    "draft_support",
    "joint_row",
    "sample_bonus",
    "sample_target",
    "target_argmax",
    "target_distribution",
]
