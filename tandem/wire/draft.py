"""DraftService: proposals and what asks for them."""

from __future__ import annotations

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    AheadBudget,
    DenseLogits,
    DraftDistribution,
    DraftedOutcomes,
    DraftOptions,
    FloatArray,
    IntArray,
    Proposal,
    ProposeStep,
    SparseDistribution,
    StepCost,
)
from tandem.v1 import draft_pb2
from tandem.wire.common import (
    cost_from_proto,
    cost_to_proto,
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
            ahead=_budget_to_proto(options.ahead),
        )
    )


def options_from_proto(message: draft_pb2.ProposeOpen) -> DraftOptions:
    """Options with which a sequence is opened.

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
        ahead=_budget_from_proto(message.ahead) if message.HasField("ahead") else None,
    )


def step_to_proto(step: ProposeStep) -> draft_pb2.ProposeRequest:
    """The message that asks for a proposal."""
    return draft_pb2.ProposeRequest(
        step=draft_pb2.ProposeStep(
            delta=delta_to_proto(step.delta),
            token_count=step.token_count,
            ahead=_budget_to_proto(step.ahead),
            proposed_count=step.proposed_count,
        )
    )


def step_from_proto(message: draft_pb2.ProposeStep) -> ProposeStep:
    """The step of a message.

    Raises:
        InvalidRequestError: a count is out of range.
    """
    if message.token_count < 0:
        raise InvalidRequestError(f"token_count is {message.token_count}; it must be at least 0")
    delta = delta_from_proto(message.delta)
    if not message.HasField("ahead"):
        return ProposeStep(delta, message.token_count)
    if not 0 <= message.proposed_count < max(delta.length, 1):
        raise InvalidRequestError(
            f"proposed_count is {message.proposed_count}; it must be from 0 to below the number of tokens, "
            f"{delta.length}"
        )
    if message.proposed_count and message.token_count:
        raise InvalidRequestError(
            f"proposed_count is {message.proposed_count} and token_count {message.token_count}; one of them must be 0"
        )
    return ProposeStep(delta, message.token_count, _budget_from_proto(message.ahead), message.proposed_count)


def _budget_to_proto(budget: AheadBudget | None) -> draft_pb2.AheadBudget | None:
    if budget is None:
        return None
    return draft_pb2.AheadBudget(branch_count=budget.branch_count, token_count=budget.token_count)


def _budget_from_proto(message: draft_pb2.AheadBudget) -> AheadBudget:
    for name, value, limit in (
        ("branch_count", message.branch_count, MAX_BRANCHES),
        ("token_count", message.token_count, MAX_AHEAD_TOKENS),
    ):
        if not 1 <= value <= limit:
            raise InvalidRequestError(f"ahead.{name} is {value}; it must be from 1 to {limit}")
    return AheadBudget(message.branch_count, message.token_count)


def finish_to_proto() -> draft_pb2.ProposeRequest:
    """The message that ends a sequence."""
    return draft_pb2.ProposeRequest(finish=draft_pb2.ProposeFinish())


def proposal_to_proto(proposal: Proposal) -> draft_pb2.ProposeResponse:
    """A proposal as a message."""
    return draft_pb2.ProposeResponse(
        cost=cost_to_proto(proposal.cost),
        base_length=proposal.base_length,
        token_ids=proposal.token_ids,
        distributions=[_distribution_to_proto(distribution) for distribution in proposal.distributions],
        token_logits=b"" if proposal.token_logits is None else floats_to_bytes(proposal.token_logits),
    )


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
            support_sizes=[len(support.token_ids) for support in supports],
            support_ids=b"".join(support.token_ids.astype("<i4").tobytes() for support in supports),
            probabilities=b"".join(support.probs.astype("<f4").tobytes() for support in supports),
        ),
    )


def answer_from_proto(message: draft_pb2.ProposeResponse) -> Proposal | DraftedOutcomes:
    """A proposal or outcomes, whichever the message holds.

    Raises:
        ProtocolError: its parts do not fit together.
    """
    if message.HasField("outcomes"):
        cost = cost_from_proto(message.cost) if message.HasField("cost") else None
        return _outcomes_from_proto(message.base_length, message.outcomes, cost)
    return proposal_from_proto(message)


def _outcomes_from_proto(
    base_length: int, message: draft_pb2.DraftedOutcomes, cost: StepCost | None
) -> DraftedOutcomes:
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
    return tuple(_support(own_ids, own) for own_ids, own in zip(ids, probs, strict=True))


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
    cost = cost_from_proto(message.cost) if message.HasField("cost") else None
    return Proposal(message.base_length, token_ids, distributions, logits, cost)


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
    token_ids = ids_to_array(list(message.sparse.token_ids))
    probs = floats_from_bytes(message.sparse.probabilities, len(token_ids), "a sparse distribution")
    return _support(token_ids, probs.astype(float))


def _support(token_ids: IntArray, probs: FloatArray) -> SparseDistribution:
    total = float(probs.sum())
    if not 0.999 < total < 1.001 or probs.min() < 0.0:
        raise ProtocolError(
            f"a sparse distribution sums to {total:g}; it must sum to 1, with nothing below 0"
        )
    if len(set(token_ids.tolist())) != len(token_ids):
        raise ProtocolError("a sparse distribution names a token twice")
    # binary32 rounded each probability; the draft sampled in proportion to them.
    return SparseDistribution(token_ids, probs / total)
