"""Draft distributions, one message each."""

from __future__ import annotations

from tandem.types import (
    DenseLogits,
    DraftDistribution,
    FloatArray,
    IntArray,
    SparseDistribution,
)
from tandem.v1 import draft_pb2
from tandem.wire.common import (
    floats_from_bytes,
    floats_to_bytes,
    ids_to_array,
    logits_from_tensor,
    logits_to_tensor,
)
from tandem.wire.distribution_columns import check_distinct, check_sum


def distribution_to_proto(distribution: DraftDistribution) -> draft_pb2.DraftDistribution:
    """A distribution as a message."""
    if isinstance(distribution, DenseLogits):
        return draft_pb2.DraftDistribution(dense_logits=logits_to_tensor(distribution.logits))
    return draft_pb2.DraftDistribution(
        sparse=draft_pb2.SparseDistribution(
            token_ids=distribution.token_ids.tolist(), probabilities=floats_to_bytes(distribution.probs)
        )
    )


def distribution_from_proto(message: draft_pb2.DraftDistribution) -> DraftDistribution:
    """The distribution of a message.

    Raises:
        ProtocolError: its parts do not fit together.
    """
    if message.WhichOneof("distribution") == "dense_logits":
        return DenseLogits(logits_from_tensor(message.dense_logits, "dense_logits"))
    token_ids = ids_to_array(list(message.sparse.token_ids))
    probs = floats_from_bytes(message.sparse.probabilities, len(token_ids), "a sparse distribution")
    return support_of(token_ids, probs.astype(float))


def support_of(token_ids: IntArray, probs: FloatArray) -> SparseDistribution:
    """A support whose probabilities were rounded to binary32.

    Raises:
        ProtocolError: they are no distribution, or an id comes twice.
    """
    # Supports are short: Python's own functions over a list are faster than numpy's, which take microseconds to begin.
    values, ids = probs.tolist(), token_ids.tolist()
    total = sum(values)
    check_sum(total, min(values, default=0.0))
    check_distinct(ids)
    # binary32 rounded each probability; the draft sampled in proportion to them.
    return SparseDistribution(token_ids, probs / total)
