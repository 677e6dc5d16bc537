"""Checks on a target's rows that hold for every acceptance rule.

The client checks each answer as it arrives, so that an invalid one costs only the replica that sent it. If the
acceptance rule found it, the request would end.
"""

from __future__ import annotations

import math

import numpy as np

from tandem.errors import ProtocolError
from tandem.types import DenseRow, RowStatistics, SupportRow, TokenRow, Verification


def check_rows(verification: Verification, vocabulary_size: int, *, with_statistics: bool = False) -> None:
    """Refuse rows that no model of that vocabulary has, and support rows that lack the statistics asked for.

    Raises:
        ProtocolError: an id is unknown, a dense row has another width, a number is no probability or logit, or
            statistics are missing.
    """
    for row in verification.rows:
        if isinstance(row, TokenRow):
            if not 0 <= row.token_id < vocabulary_size:  # to call `_check_id` for each takes twice as long
                _check_id(row.token_id, 0, vocabulary_size)
        elif isinstance(row, SupportRow):
            _check_support_row(row, vocabulary_size)
            if with_statistics and row.statistics is None:
                raise ProtocolError("target service: a row came without statistics; they were asked for")
        else:
            _check_dense_row(row, vocabulary_size)


def _check_id(token_id: int, minimum: int, vocabulary_size: int) -> None:
    if not minimum <= token_id < vocabulary_size:
        raise ProtocolError(
            f"target service: it sent token id {token_id}; ids must be in 0..{vocabulary_size - 1}"
        )


def _check_support_row(row: SupportRow, vocabulary_size: int) -> None:
    # -1 stands for no token outside the support; then the mass there does not count.
    _check_id(row.outside_token_id, -1, vocabulary_size)
    outside = row.outside_mass if row.outside_token_id >= 0 else 0.0
    values = row.probs.tolist()
    minimum, mass = min(values, default=0.0), sum(values) + outside
    # A NaN makes the sum one, and comparisons with it are false. The sum may exceed 1: the support may name a token
    # twice.
    if not (minimum >= 0.0 and outside >= 0.0 and 0.0 < mass < math.inf):
        raise ProtocolError(
            f"target service: a row's lowest probability is {np.min([outside, *values]):g} and their sum is {mass:g}; "
            "no probability may be negative, and the sum must be a positive number"
        )
    # A token's probability is at most the mass that holds it, before and after rounding.
    if row.outside_prob is not None and not 0.0 <= row.outside_prob <= outside:
        raise ProtocolError(
            f"target service: a row's token outside the support has the probability {row.outside_prob:g}; it must be "
            f"between 0 and the mass there, {outside:g}"
        )
    if row.statistics is not None:
        _check_statistics(row.statistics, vocabulary_size)


def _check_statistics(statistics: RowStatistics, vocabulary_size: int) -> None:
    _check_id(statistics.argmax_token_id, 0, vocabulary_size)
    maximum = float(statistics.logits.max(initial=-math.inf))
    numbers = {"entropy": statistics.entropy, "highest probability": statistics.max_prob}
    for name, value in numbers.items():
        # Rounding may leave an entropy just below zero.
        if not math.isfinite(value):
            raise ProtocolError(f"target service: a row's {name} is {value:g}; it must be a finite number")
    if not maximum < math.inf:
        raise ProtocolError(
            f"target service: a row's highest logit in its support is {maximum:g}; it must be a number below infinity"
        )


def _check_dense_row(row: DenseRow, vocabulary_size: int) -> None:
    if row.logits.shape != (vocabulary_size,):
        raise ProtocolError(
            f"target service: a dense row holds {row.logits.size} logits; it must hold {vocabulary_size}, one for "
            "each token of the vocabulary"
        )
    # One pass is enough: max() returns NaN wherever there is one. Models forbid single tokens by minus infinity.
    maximum = float(row.logits.max())
    if not math.isfinite(maximum):
        raise ProtocolError(
            f"target service: a dense row's highest logit is {maximum:g}; it must be a finite number"
        )
