"""DraftService: the distributions that proposed tokens were drawn from, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from tandem.errors import ProtocolError
from tandem.types import (
    DraftDistribution,
    Float32Array,
    Proposal,
    SparseDistribution,
    StepCost,
)
from tandem.v1.draft_pb2 import DistributionColumns
from tandem.wire.columns import ints_to_bytes, sizes_from_bytes
from tandem.wire.common import floats_from_bytes, floats_to_bytes


def columns_to_proto(distributions: Sequence[DraftDistribution]) -> DistributionColumns | None:
    """The distributions of a proposal as columns; None where one of them is that of a whole vocabulary."""
    supports = [each for each in distributions if isinstance(each, SparseDistribution)]
    if len(supports) != len(distributions):
        return None
    if not supports:
        return DistributionColumns()
    return DistributionColumns(
        support_sizes=ints_to_bytes([len(each.token_ids) for each in supports]),
        support_ids=np.concatenate([each.token_ids for each in supports]).astype("<i4").tobytes(),
        probabilities=floats_to_bytes(np.concatenate([each.probs for each in supports])),
    )


def check_sum(total: float, lowest: float) -> None:
    """Refuse probabilities that do not sum to one.

    Raises:
        ProtocolError: naming their sum.
    """
    if not 0.999 < total < 1.001 or lowest < 0.0:
        raise ProtocolError(
            f"a sparse distribution sums to {total:g}; it must sum to 1, with nothing below 0"
        )


def check_distinct(token_ids: Sequence[int]) -> None:
    """Refuse a support with a repeated id.

    Raises:
        ProtocolError: it has one.
    """
    if len(set(token_ids)) != len(token_ids):
        raise ProtocolError("a sparse distribution names a token twice")


class DistributionBlock:
    """The distributions of one message, those of all its sequences."""

    def __init__(self, message: DistributionColumns) -> None:
        """Read the columns.

        Raises:
            ProtocolError: they do not fit together.
        """
        sizes = sizes_from_bytes(message.support_sizes, "the column of support sizes")
        if 0 in sizes:
            raise ProtocolError("a sparse distribution sums to 0; it must sum to 1, with nothing below 0")
        total = sum(sizes)
        if len(message.support_ids) != 4 * total:
            raise ProtocolError(
                f"the column of support ids holds {len(message.support_ids)} bytes; it must hold {4 * total} for "
                f"{total} values"
            )
        self.count = len(sizes)
        """Number of distributions."""
        self._bounds = list(pairwise(accumulate(sizes, initial=0)))
        self._token_ids = np.frombuffer(message.support_ids, "<i4").astype(np.int64)
        probs = floats_from_bytes(message.probabilities, total, "a sparse distribution").astype(float)
        # Supports are short: Python's own functions over a list are faster than numpy's, which take microseconds to
        # begin.
        self._id_list, self._values = self._token_ids.tolist(), probs.tolist()
        self._lowest = min(self._values, default=0.0)
        self._totals = [sum(self._values[first:last]) for first, last in self._bounds]
        # binary32 rounded each probability; the draft sampled in proportion to them. A sum that is refused divides
        # nothing.
        divisors = [each if 0.999 < each < 1.001 else 1.0 for each in self._totals]
        self._probs = probs / np.repeat(divisors, sizes)

    def distributions(self, start: int, stop: int) -> tuple[SparseDistribution, ...]:
        """The distributions from `start` to before `stop`.

        Raises:
            ProtocolError: one does not sum to one, or names a token twice.
        """
        bounds = self._bounds[start:stop]
        for (first, last), total in zip(bounds, self._totals[start:stop], strict=True):
            check_sum(total, 0.0 if self._lowest >= 0.0 else min(self._values[first:last]))
            check_distinct(self._id_list[first:last])
        return tuple(
            SparseDistribution(self._token_ids[first:last], self._probs[first:last]) for first, last in bounds
        )


class ProposalBlock:
    """The proposals of one message, those of all its sequences."""

    def __init__(
        self, token_ids: list[int], token_logits: Float32Array | None, distributions: DistributionBlock
    ) -> None:
        """Join what is known of all tokens.

        Raises:
            ProtocolError: there are distributions, but not one for each token.
        """
        if distributions.count not in (0, len(token_ids)):
            raise ProtocolError(
                f"a proposal of {len(token_ids)} tokens came with {distributions.count} distributions; it must have "
                "one for each token or none"
            )
        self._token_ids = token_ids
        self._token_logits = token_logits
        self._distributions = distributions

    def proposal(self, base_length: int, cost: StepCost | None, start: int, stop: int) -> Proposal:
        """The proposal of the tokens from `start` to before `stop`.

        Raises:
            ProtocolError: see `DistributionBlock.distributions`.
        """
        logits = None if self._token_logits is None else self._token_logits[start:stop]
        drawn_from = self._distributions.distributions(start, stop) if self._distributions.count else ()
        return Proposal(base_length, tuple(self._token_ids[start:stop]), drawn_from, logits, cost)


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class ColumnAnswer:
    """A sequence's proposal within a block."""

    base_length: int
    cost: StepCost | None
    block: ProposalBlock
    start: int
    stop: int

    def proposal(self) -> Proposal:
        """See `ProposalBlock.proposal`."""
        return self.block.proposal(self.base_length, self.cost, self.start, self.stop)
