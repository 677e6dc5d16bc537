"""Rows of a target that gives one token all the probability."""

from __future__ import annotations

import numpy as np

from tandem.types import DenseRow, IntArray, RowStatistics

VOCABULARY_SIZE = 2048


def sure_row(token_id: int) -> DenseRow:
    """Return logits that give this token all the probability; the next higher id ranks second."""
    logits = np.full(VOCABULARY_SIZE, -1000.0, np.float32)
    logits[token_id], logits[(token_id + 1) % VOCABULARY_SIZE] = 0.0, -900.0
    return DenseRow(logits)


def sure_statistics(support: IntArray, token_id: int) -> RowStatistics:
    """Return the statistics of such a row for the tokens of a support."""
    is_other = support != token_id
    return RowStatistics(
        entropy=0.0,
        max_prob=1.0,
        argmax_token_id=token_id,
        ranks=is_other.astype(np.int64),
        logits=np.where(is_other, -1000.0, 0.0).astype(np.float32),
    )
