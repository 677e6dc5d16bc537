"""One view of draft and target rows, whatever their kind.

The rules see a target distribution as probabilities on a support, the mass outside it, and one sample from outside with
its probability. Exact rejection sampling needs no more when the support covers every token that the draft could have
proposed: outside it the draft has no mass, so the residual max(target - draft, 0) is the target's distribution, and of
all tokens outside only that sample can become the token after the accepted run. A dense row is sampled whole, with the
noise that a target service would use, so both kinds of row give the same tokens.
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
