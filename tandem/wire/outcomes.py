"""Outcomes of a verification that a draft has drafted ahead for, as messages."""

from __future__ import annotations

import numpy as np

from tandem.errors import ProtocolError
from tandem.types import (
    DraftedOutcomes,
    SparseDistribution,
    StepCost,
)
from tandem.v1 import draft_pb2
from tandem.wire.common import (
    cost_to_proto,
    floats_from_bytes,
)
from tandem.wire.distributions import support_of


def outcomes_to_proto(outcomes: DraftedOutcomes) -> draft_pb2.ProposeResponse:
    """DraftedOutcomes as a message."""
    supports = outcomes.distributions
    return draft_pb2.ProposeResponse(
        cost=cost_to_proto(outcomes.cost),
        base_length=outcomes.base_length,
        outcomes=draft_pb2.DraftedOutcomes(
            depth=outcomes.depth,
            accepted_counts=outcomes.accepted_counts,
            next_token_ids=outcomes.next_token_ids,
            token_ids=outcomes.token_ids,
            lead_token_ids=outcomes.lead_token_ids,
            support_sizes=[len(support.token_ids) for support in supports],
            support_ids=b"".join(support.token_ids.astype("<i4").tobytes() for support in supports),
            probabilities=b"".join(support.probs.astype("<f4").tobytes() for support in supports),
        ),
    )


def outcomes_from_proto(
    base_length: int, message: draft_pb2.DraftedOutcomes, cost: StepCost | None
) -> DraftedOutcomes:
    """Outcomes as they came.

    Raises:
        ProtocolError: their parts do not fit together.
    """
    if len(message.accepted_counts) != len(message.next_token_ids):
        raise ProtocolError(
            f"outcomes came with {len(message.accepted_counts)} accepted counts and {len(message.next_token_ids)} "
            "next tokens; there must be as many of both"
        )
    return DraftedOutcomes(
        base_length=base_length,
        depth=message.depth,
        token_ids=tuple(message.token_ids),
        accepted_counts=tuple(message.accepted_counts),
        next_token_ids=tuple(message.next_token_ids),
        distributions=_supports_from_proto(message) if message.support_sizes else (),
        lead_token_ids=tuple(message.lead_token_ids),
        cost=cost,
    )


def _supports_from_proto(message: draft_pb2.DraftedOutcomes) -> tuple[SparseDistribution, ...]:
    sizes = list(message.support_sizes)
    if len(sizes) != len(message.token_ids) or min(sizes) < 1:
        raise ProtocolError(
            f"outcomes of {len(message.token_ids)} tokens came with supports of {sizes} ids; there must be one support "
            "for each token, with at least one id"
        )
    total = sum(sizes)
    if len(message.support_ids) != 4 * total:
        raise ProtocolError(
            f"the supports of outcomes hold {len(message.support_ids)} bytes of ids; their sizes ask for {4 * total}"
        )
    ends = np.cumsum(sizes)[:-1]
    ids = np.split(np.frombuffer(message.support_ids, dtype="<i4").astype(np.int64), ends)
    probs = np.split(
        floats_from_bytes(message.probabilities, total, "supports of outcomes").astype(float), ends
    )
    return tuple(support_of(own_ids, own) for own_ids, own in zip(ids, probs, strict=True))
