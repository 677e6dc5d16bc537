"""Probabilities of models that are not there."""

from __future__ import annotations

import numpy as np

from tandem.types import FloatArray, IntArray, SupportRow


def support_row(token_id: int, support: IntArray, *, is_raced: bool) -> SupportRow:
    """The row of a target that is sure of one token."""
    inside = support == token_id
    outside = float(not inside.any())
    return SupportRow(
        support,
        inside.astype(float),
        outside_mass=outside,
        outside_token_id=token_id if outside else -1,
        outside_prob=outside if is_raced else None,
    )


def peaked(size: int) -> FloatArray:
    """Probabilities that sum to one: most of it on the first id."""
    probabilities = np.full(size, 0.1 / (size - 1))
    probabilities[0] = 0.9
    return probabilities
