"""DraftService: proposals and what asks for them."""

from __future__ import annotations

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    DenseLogits,
    DraftDistribution,
    DraftOptions,
    Proposal,
    ProposeStep,
    SparseDistribution,
)
from tandem.v1 import draft_pb2
from tandem.wire.common import (
    delta_from_proto,
    delta_to_proto,
    floats_from_bytes,
    floats_to_bytes,
    ids_to_array,
    logits_from_tensor,
    logits_to_tensor,
    row_kind_from_proto,
    row_kind_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)


def options_to_proto(options: DraftOptions) -> draft_pb2.ProposeRequest:
    """The message that opens a sequence."""
    return draft_pb2.ProposeRequest(
        open=draft_pb2.ProposeOpen(
            request_id=options.request_id,
            sampling=sampling_to_proto(options.sampling),
            max_length=options.max_length,
            row_kind=row_kind_to_proto(options.row_kind),
            draft_top_k=options.draft_top_k,
            with_token_logits=options.with_token_logits,
            traceparent=options.traceparent,
        )
    )


def options_from_proto(message: draft_pb2.ProposeOpen) -> DraftOptions:
    """What a sequence is opened with.

    Raises:
        InvalidRequestError: a field is out of range.
    """
    if message.draft_top_k < 0:
        raise InvalidRequestError(f"draft_top_k is {message.draft_top_k}; it must be at least 0")
    return DraftOptions(
        request_id=message.request_id,
        sampling=sampling_from_proto(message.sampling),
        max_length=message.max_length,
        row_kind=row_kind_from_proto(message.row_kind),
        draft_top_k=message.draft_top_k,
        with_token_logits=message.with_token_logits,
        traceparent=message.traceparent,
    )


def step_to_proto(step: ProposeStep) -> draft_pb2.ProposeRequest:
    """The message that asks for a proposal."""
    return draft_pb2.ProposeRequest(
        step=draft_pb2.ProposeStep(delta=delta_to_proto(step.delta), token_count=step.token_count)
    )


def step_from_proto(message: draft_pb2.ProposeStep) -> ProposeStep:
    """The step of a message.

    Raises:
        InvalidRequestError: a count is negative.
    """
    if message.token_count < 0:
        raise InvalidRequestError(f"token_count is {message.token_count}; it must be at least 0")
    return ProposeStep(delta_from_proto(message.delta), message.token_count)


def finish_to_proto() -> draft_pb2.ProposeRequest:
    """The message that ends a sequence."""
    return draft_pb2.ProposeRequest(finish=draft_pb2.ProposeFinish())


def proposal_to_proto(proposal: Proposal) -> draft_pb2.ProposeResponse:
    """A proposal as a message."""
    return draft_pb2.ProposeResponse(
        base_length=proposal.base_length,
        token_ids=proposal.token_ids,
        distributions=[_distribution_to_proto(distribution) for distribution in proposal.distributions],
        token_logits=b"" if proposal.token_logits is None else floats_to_bytes(proposal.token_logits),
    )


def proposal_from_proto(message: draft_pb2.ProposeResponse) -> Proposal:
    """The proposal of a message.

    Raises:
        ProtocolError: its parts do not fit together.
    """
    token_ids = tuple(message.token_ids)
    if message.distributions and len(message.distributions) != len(token_ids):
        raise ProtocolError(
            f"a proposal of {len(token_ids)} tokens came with {len(message.distributions)} distributions; "
            "it must have one for each token or none"
        )
    logits = (
        floats_from_bytes(message.token_logits, len(token_ids), "token_logits")
        if message.token_logits
        else None
    )
    distributions = tuple(_distribution_from_proto(distribution) for distribution in message.distributions)
    return Proposal(message.base_length, token_ids, distributions, logits)


def _distribution_to_proto(distribution: DraftDistribution) -> draft_pb2.DraftDistribution:
    if isinstance(distribution, DenseLogits):
        return draft_pb2.DraftDistribution(dense_logits=logits_to_tensor(distribution.logits))
    return draft_pb2.DraftDistribution(
        sparse=draft_pb2.SparseDistribution(
            token_ids=distribution.token_ids.tolist(), probabilities=floats_to_bytes(distribution.probs)
        )
    )


def _distribution_from_proto(message: draft_pb2.DraftDistribution) -> DraftDistribution:
    if message.WhichOneof("distribution") == "dense_logits":
        return DenseLogits(logits_from_tensor(message.dense_logits, "dense_logits"))
    token_ids = list(message.sparse.token_ids)
    probs = floats_from_bytes(message.sparse.probabilities, len(token_ids), "a sparse distribution").astype(
        float
    )
    total = float(probs.sum())
    if not 0.999 < total < 1.001 or probs.min() < 0.0:
        raise ProtocolError(
            f"a sparse distribution sums to {total:g}; it must sum to 1, with nothing below 0"
        )
    if len(set(token_ids)) != len(token_ids):
        raise ProtocolError("a sparse distribution names a token twice")
    # binary32 rounded each probability; what the draft drew from is their ratio.
    return SparseDistribution(ids_to_array(token_ids), probs / total)
