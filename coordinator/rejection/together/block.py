"""`block` for many rounds at once: `block.accept` in numpy over all of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from coordinator.rejection.together.joint_rows import JointRows, Kept, decide
from coordinator.rejection.together.rounds import Round
from tandem.types import Acceptance, FloatArray

_MIN_DISTANCE = 1e-9
"""A uniform this close to its threshold is left to the rule: a sum over several rows adds in another order, and so may
differ in its last bits (of N numbers, none of them negative, by N * 1e-16 of it at most)."""


def accept_many(rounds: Sequence[Round]) -> list[Acceptance | None]:
    """Decide each round as `block.accept` does; see `joint_rows.decide`."""
    return decide(rounds, _keep)


def _keep(joint: JointRows) -> list[Kept | None]:
    """The longest prefix of each round that passes its test, and its weight."""
    is_prob = (joint.token_probs >= 0.0) & np.isfinite(joint.ratios)
    with np.errstate(invalid="ignore"):
        weights = _prefix_weights(joint)
        thresholds = _keep_probabilities(joint, weights)
        passes = joint.uniforms < thresholds
        # False for NaN as well.
        is_clear = is_prob & (np.abs(joint.uniforms - thresholds) > _MIN_DISTANCE)
    all_passes, all_weights, clear = passes.tolist(), weights.tolist(), is_clear.tolist()
    kept: list[Kept | None] = []
    for count, start in zip(joint.counts, _starts(joint), strict=True):
        if not all(clear[start : start + count]):
            kept.append(None)
            continue
        length = count
        while length and not all_passes[start + length - 1]:
            length -= 1
        kept.append((length, all_weights[start + length - 1] if length else 1.0))
    return kept


def _prefix_weights(joint: JointRows) -> FloatArray:
    """p_i of the paper for the prefixes of 1 to K tokens of each round, shape [N]."""
    weights = joint.ratios.copy()
    counts, starts = np.array(joint.counts), np.array(_starts(joint))
    np.minimum(weights, 1.0, out=weights)
    for index in range(1, int(counts.max())):
        at = starts[counts > index] + index
        weights[at] = np.minimum(weights[at - 1] * joint.ratios[at], 1.0)
    return weights


def _keep_probabilities(joint: JointRows, weights: FloatArray) -> FloatArray:
    """h_i of the paper for the prefixes of 1 to K tokens of each round, shape [N]. See `block._keep_probability`."""
    sizes = joint.sizes
    # A prefix is followed by the row of the token after it; the first row of a round follows none.
    scales = np.concatenate(([1.0], weights[:-1]))
    residuals = np.repeat(scales, sizes) * joint.target_probs
    residuals -= np.fmax(joint.draft_probs, 0.0)
    np.maximum(residuals, 0.0, out=residuals)
    begins = np.cumsum([0, *sizes[:-1]])
    masses = np.add.reduceat(residuals, begins)
    masses += scales * np.array(
        [row.outside_mass if row.outside_token_id >= 0 else 0.0 for row in joint.rows]
    )
    following = masses[1:]
    thresholds = weights.copy()
    # Zero over zero means that draft and target are equal after the prefix: a longer one is kept.
    thresholds[:-1] = np.divide(
        following,
        following + 1.0 - weights[:-1],
        out=np.where(following == 0.0, 0.0, np.nan),
        where=following > 0.0,
    )
    lasts = np.array(_starts(joint)) + joint.counts - 1
    thresholds[lasts] = weights[lasts]
    return thresholds


def _starts(joint: JointRows) -> list[int]:
    """Where each round's tokens begin, R."""
    return [0, *accumulate(joint.counts[:-1])]
