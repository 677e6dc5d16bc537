"""What a target's rows must be, whichever acceptance rule reads them.

Checked where an answer comes in: there a bad one costs the replica that sent it. Found by the rule, it would end the
request.
"""

from __future__ import annotations

import math

from tandem.errors import ProtocolError
from tandem.types import DenseRow, RowStatistics, SupportRow, TokenRow, Verification


def check_rows(verification: Verification, vocabulary_size: int, *, with_statistics: bool = False) -> None:
    """Refuse rows that no model of that vocabulary has, and support rows that lack the statistics asked for.

    Raises:
        ProtocolError: an id is none, a dense row is of another width, numbers are no probabilities or logits, or
            statistics are missing.
    """
    for row in verification.rows:
        if isinstance(row, TokenRow):
            _check_id(row.token_id, 0, vocabulary_size)
        elif isinstance(row, SupportRow):
            _check_support_row(row, vocabulary_size)
            if with_statistics and row.statistics is None:
                raise ProtocolError("target service: a row came without statistics; they were asked for")
        else:
            _check_dense_row(row, vocabulary_size)


def _check_id(token_id: int, least: int, vocabulary_size: int) -> None:
    if not least <= token_id < vocabulary_size:
        raise ProtocolError(
            f"target service: it said token id {token_id}; ids must be in 0..{vocabulary_size - 1}"
        )


def _check_support_row(row: SupportRow, vocabulary_size: int) -> None:
    # -1 stands for no token outside the support; the mass there counts for nothing then.
    _check_id(row.outside_token_id, -1, vocabulary_size)
    outside = row.outside_mass if row.outside_token_id >= 0 else 0.0
    lowest, mass = float(row.probs.min(initial=0.0)), float(row.probs.sum()) + outside
    # Comparisons with what is not a number are false. The sum is not held to 1: the support may name a token twice.
    if not (lowest >= 0.0 and outside >= 0.0 and 0.0 < mass < math.inf):
        raise ProtocolError(
            f"target service: a row's lowest probability is {min(lowest, outside):g} and their sum is {mass:g}; no "
            "probability may be negative, and the sum must be a positive number"
        )
    if row.statistics is not None:
        _check_statistics(row.statistics, vocabulary_size)


def _check_statistics(statistics: RowStatistics, vocabulary_size: int) -> None:
    _check_id(statistics.argmax_token_id, 0, vocabulary_size)
    highest = float(statistics.logits.max(initial=-math.inf))
    figures = {"entropy": statistics.entropy, "highest probability": statistics.max_prob}
    for name, value in figures.items():
        # Rounding may leave an entropy just below zero.
        if not math.isfinite(value):
            raise ProtocolError(f"target service: a row's {name} is {value:g}; it must be a finite number")
    if not highest < math.inf:
        raise ProtocolError(
            f"target service: a row's highest logit in its support is {highest:g}; it must be a number below infinity"
        )


def _check_dense_row(row: DenseRow, vocabulary_size: int) -> None:
    if row.logits.shape != (vocabulary_size,):
        raise ProtocolError(
            f"target service: a dense row holds {row.logits.size} logits; it must hold {vocabulary_size}, one for "
            "each token of the vocabulary"
        )
    # One pass tells all: NaN is the highest wherever it is. Minus infinity is how a model forbids a token, not all.
    highest = float(row.logits.max())
    if not math.isfinite(highest):
        raise ProtocolError(
            f"target service: a dense row's highest logit is {highest:g}; it must be a finite number"
        )
