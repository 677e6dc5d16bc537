"""DraftService: proposals and what asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    AheadBudget,
    DraftedOutcomes,
    DraftOptions,
    Proposal,
    ProposeStep,
)
from tandem.v1 import draft_pb2, types_pb2
from tandem.wire.columns import (
    Arrived,
    heads_from_proto,
    heads_to_proto,
    ints_from_bytes,
    ints_to_bytes,
    joined,
    parts,
)
from tandem.wire.common import (
    cost_from_proto,
    cost_to_proto,
    delta_from_proto,
    floats_from_bytes,
    floats_to_bytes,
    row_kind_from_proto,
    row_kind_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    set_delta,
)
from tandem.wire.distribution_columns import (
    ColumnAnswer,
    DistributionBlock,
    ProposalBlock,
    columns_to_proto,
)
from tandem.wire.distributions import distribution_from_proto, distribution_to_proto
from tandem.wire.outcomes import outcomes_from_proto
from tandem.wire.parts import ColumnPart, grouped

Answer: TypeAlias = "draft_pb2.ProposeResponse | ColumnAnswer"
"""A proposal or outcomes as they came: in a message of their own, or within one for several sequences."""


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
            takes_columns=options.takes_columns,
            client=options.client,
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
        takes_columns=message.takes_columns,
        client=message.client,
    )


def step_to_proto(step: ProposeStep) -> draft_pb2.ProposeRequest:
    """The message that asks for a proposal."""
    request = draft_pb2.ProposeRequest()
    message = request.step
    set_delta(message.delta, step.delta)
    message.token_count = step.token_count
    message.proposed_count = step.proposed_count
    if step.ahead is not None:
        message.ahead.branch_count = step.ahead.branch_count
        message.ahead.token_count = step.ahead.token_count
    return request


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


def proposal_to_proto(proposal: Proposal, *, with_columns: bool = False) -> draft_pb2.ProposeResponse:
    """A proposal as a message.

    Args:
        proposal: The proposal.
        with_columns: True if its sequence takes columns.
    """
    columns = columns_to_proto(proposal.distributions) if with_columns else None
    rows = proposal.distributions if columns is None else ()
    return draft_pb2.ProposeResponse(
        cost=cost_to_proto(proposal.cost),
        base_length=proposal.base_length,
        token_ids=proposal.token_ids,
        distributions=[distribution_to_proto(distribution) for distribution in rows],
        token_logits=b"" if proposal.token_logits is None else floats_to_bytes(proposal.token_logits),
        columns=columns,
    )


def many_to_proto(
    answers: Iterable[types_pb2.SequencePart | ColumnPart[draft_pb2.ProposeResponse]],
) -> draft_pb2.ProposeManyResponse:
    """A message of a shared stream: answers with columns become one block for each form of proposal."""
    own, groups = grouped(answers, lambda each: (bool(each.columns.support_sizes), bool(each.token_logits)))
    message = draft_pb2.ProposeManyResponse(parts=own)
    for group in groups:
        proposals = [part.answer for part in group]
        block = message.columns.add()
        block.answers.CopyFrom(heads_to_proto((part.sequence, part.answer) for part in group))
        block.token_counts = ints_to_bytes([len(each.token_ids) for each in proposals])
        block.token_ids = ints_to_bytes(list(chain.from_iterable(each.token_ids for each in proposals)))
        block.token_logits = b"".join(each.token_logits for each in proposals)
        joined([each.columns for each in proposals], block.distributions)
    return message


def columns_from_proto(message: draft_pb2.ProposeManyResponse) -> Iterator[Arrived[Answer]]:
    """The proposals that a message of a shared stream has as columns.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    for columns in message.columns:
        count = len(columns.token_ids) // 4
        token_ids = ints_from_bytes(columns.token_ids, count, "the column of tokens")
        logits = (
            floats_from_bytes(columns.token_logits, count, "token_logits") if columns.token_logits else None
        )
        block = ProposalBlock(token_ids, logits, DistributionBlock(columns.distributions))
        yield from parts(
            heads_from_proto(columns.answers),
            columns.token_counts,
            count,
            columns.ByteSize(),
            lambda head, start, stop, block=block: ColumnAnswer(  # type: ignore[misc]
                head.base_length, head.cost, block, start, stop
            ),
        )


def answer_from_proto(message: Answer) -> Proposal | DraftedOutcomes:
    """A proposal or outcomes, whichever the message holds.

    Raises:
        ProtocolError: its parts do not fit together.
    """
    if isinstance(message, ColumnAnswer):
        return message.proposal()
    if message.HasField("outcomes"):
        cost = cost_from_proto(message.cost) if message.HasField("cost") else None
        return outcomes_from_proto(message.base_length, message.outcomes, cost)
    return proposal_from_proto(message)


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
    cost = cost_from_proto(message.cost) if message.HasField("cost") else None
    if message.HasField("columns") and message.columns.ByteSize():
        block = ProposalBlock(list(token_ids), logits, DistributionBlock(message.columns))
        return block.proposal(message.base_length, cost, 0, len(token_ids))
    distributions = tuple(distribution_from_proto(distribution) for distribution in message.distributions)
    return Proposal(message.base_length, token_ids, distributions, logits, cost)
