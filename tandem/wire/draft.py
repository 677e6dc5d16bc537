"""DraftService: the distributions that proposed tokens were drawn from, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeAlias

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
    Float32Array,
    FloatArray,
    IntArray,
    Proposal,
    ProposeStep,
    SparseDistribution,
    StepCost,
)
from tandem.v1 import draft_pb2, types_pb2
from tandem.v1.draft_pb2 import DistributionColumns
from tandem.wire.columns import (
    Arrived,
    ColumnPart,
    grouped,
    heads_from_proto,
    heads_to_proto,
    ints_from_bytes,
    ints_to_bytes,
    joined,
    parts,
    sizes_from_bytes,
)
from tandem.wire.common import (
    cost_from_proto,
    cost_to_proto,
    delta_from_proto,
    floats_from_bytes,
    floats_to_bytes,
    ids_to_array,
    logits_from_tensor,
    logits_to_tensor,
    row_kind_from_proto,
    row_kind_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    set_delta,
)


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
