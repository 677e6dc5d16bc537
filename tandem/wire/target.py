"""TargetService: verifications and what asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    DenseRow,
    IntArray,
    RowKind,
    RowStatistics,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2, types_pb2
from tandem.wire.adjustments import adjustments_from_proto, adjustments_to_proto
from tandem.wire.columns import Arrived, heads_from_proto, heads_to_proto, ints_to_bytes, joined, parts
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
from tandem.wire.parts import ColumnPart, grouped
from tandem.wire.row_columns import ColumnAnswer, RowBlock, columns_to_proto, form

Answer: TypeAlias = "target_pb2.VerifyResponse | ColumnAnswer"
"""A verification as it came: in a message of its own, or within one for several sequences."""

_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


def options_to_proto(options: TargetOptions) -> target_pb2.VerifyRequest:
    """The message that opens a sequence."""
    return target_pb2.VerifyRequest(
        open=target_pb2.VerifyOpen(
            request_id=options.request_id,
            sampling=sampling_to_proto(options.sampling),
            max_length=options.max_length,
            traceparent=options.traceparent,
            prompt_token_count=options.prompt_length,
            logit_adjustments=adjustments_to_proto(options.adjustments),
            takes_columns=options.takes_columns,
            client=options.client,
        )
    )


def options_from_proto(message: target_pb2.VerifyOpen) -> TargetOptions:
    """Options with which a sequence is opened.

    Raises:
        InvalidRequestError: a field is out of range.
    """
    if message.prompt_token_count < 0:
        raise InvalidRequestError(
            f"prompt_token_count is {message.prompt_token_count}; it must be at least 0"
        )
    return TargetOptions(
        message.request_id,
        sampling_from_proto(message.sampling),
        message.max_length,
        message.traceparent,
        message.prompt_token_count,
        adjustments_from_proto(message.logit_adjustments),
        message.takes_columns,
        message.client,
    )


def step_to_proto(step: VerifyStep) -> target_pb2.VerifyRequest:
    """The message that asks for rows."""
    request = target_pb2.VerifyRequest()
    message = request.step
    set_delta(message.delta, step.delta)
    message.row_kind = row_kind_to_proto(step.row_kind)
    message.row_count = step.row_count
    for support in step.supports:
        message.supports.add().token_ids.extend(support.tolist())
    message.with_statistics = step.with_statistics
    message.raced_recovery = step.raced_recovery
    return request


def step_from_proto(message: target_pb2.VerifyStep) -> VerifyStep:
    """The step of a message.

    Raises:
        InvalidRequestError: a count is out of range, or there are more supports than rows.
    """
    if message.row_count < 0:
        raise InvalidRequestError(f"row_count is {message.row_count}; it must be at least 0")
    if len(message.supports) > message.row_count:
        raise InvalidRequestError(
            f"{len(message.supports)} supports came for {message.row_count} rows; there may be at most one for each"
        )
    return VerifyStep(
        delta_from_proto(message.delta),
        row_kind_from_proto(message.row_kind),
        message.row_count,
        tuple(ids_to_array(support.token_ids) for support in message.supports),
        message.with_statistics,
        message.raced_recovery,
    )


def finish_to_proto(token_count: int) -> target_pb2.VerifyRequest:
    """The message that ends a sequence, of whose first tokens the coordinator keeps so many."""
    return target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish(token_count=token_count))


def kept_from_proto(message: target_pb2.VerifyFinish) -> int | None:
    """How many of the sequence's first tokens the coordinator keeps; None from one that does not say so."""
    return message.token_count if message.HasField("token_count") else None


def verification_to_proto(
    verification: Verification, *, with_columns: bool = False
) -> target_pb2.VerifyResponse:
    """A verification as a message.

    Args:
        verification: The verification.
        with_columns: True if its sequence takes columns.
    """
    response = target_pb2.VerifyResponse(
        base_length=verification.base_length, cost=cost_to_proto(verification.cost)
    )
    if with_columns and (columns := columns_to_proto(verification.rows)) is not None:
        response.columns.CopyFrom(columns)
        return response
    tokens = [row.token_id for row in verification.rows if isinstance(row, TokenRow)]
    supports = [_support_row_to_proto(row) for row in verification.rows if isinstance(row, SupportRow)]
    dense = [row.logits for row in verification.rows if isinstance(row, DenseRow)]
    if tokens:
        response.token_rows.token_ids.extend(tokens)
    elif supports:
        response.support_rows.rows.extend(supports)
    elif dense:
        response.dense_rows.CopyFrom(logits_to_tensor(np.stack(dense)))
    return response


def many_to_proto(
    answers: Iterable[types_pb2.SequencePart | ColumnPart[target_pb2.VerifyResponse]],
) -> target_pb2.VerifyManyResponse:
    """A message of a shared stream: answers with columns become one block for each form of row."""
    own, groups = grouped(answers, lambda answer: form(answer.columns))
    message = target_pb2.VerifyManyResponse(parts=own)
    for group in groups:
        rows = [part.answer.columns for part in group]
        block = message.columns.add()
        block.answers.CopyFrom(heads_to_proto((part.sequence, part.answer) for part in group))
        block.row_counts = ints_to_bytes([len(each.token_ids or each.support_sizes) // 4 for each in rows])
        joined(rows, block.rows)
    return message


def columns_from_proto(message: target_pb2.VerifyManyResponse) -> Iterator[Arrived[Answer]]:
    """The answers that a message of a shared stream has as columns.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    for columns in message.columns:
        block = RowBlock(columns.rows)
        heads = heads_from_proto(columns.answers)
        yield from parts(
            heads,
            columns.row_counts,
            block.count,
            columns.ByteSize(),
            lambda head, start, stop, block=block: ColumnAnswer(  # type: ignore[misc]
                head.base_length, head.cost, block, start, stop
            ),
        )


def verification_from_proto(answer: Answer, step: VerifyStep) -> Verification:
    """The verification that answers `step`.

    Raises:
        ProtocolError: it does not have the rows that were requested.
    """
    if isinstance(answer, ColumnAnswer):
        rows, cost = answer.rows(step), answer.cost
    else:
        rows = _rows_from_proto(answer, step)
        cost = cost_from_proto(answer.cost) if answer.HasField("cost") else None
    if len(rows) != step.row_count:
        raise ProtocolError(f"{len(rows)} rows came for {step.row_count} that were requested")
    return Verification(answer.base_length, rows, cost)


def _rows_from_proto(message: target_pb2.VerifyResponse, step: VerifyStep) -> tuple[TargetRow, ...]:
    match message.WhichOneof("rows"), step.row_kind:
        case "token_rows", RowKind.TOKEN:
            return tuple(TokenRow(token_id) for token_id in message.token_rows.token_ids)
        case "support_rows", RowKind.SUPPORT:
            padding = (_EMPTY_SUPPORT,) * (step.row_count - len(step.supports))
            supports = step.supports + padding
            rows = message.support_rows.rows
            return tuple(map(_support_row_from_proto, rows, supports))
        case "dense_rows", RowKind.DENSE:
            return _dense_rows_from_proto(message.dense_rows)
        case "columns", _:
            block = RowBlock(message.columns)
            return block.rows(0, block.count, step)
        case None, _:
            return ()
        case kind, expected:
            raise ProtocolError(f"{kind} came where {expected.value} rows were requested")


def _dense_rows_from_proto(tensor: types_pb2.Tensor) -> tuple[DenseRow, ...]:
    shape = tuple(tensor.shape)
    if len(shape) != 2 or min(shape) < 0:
        raise ProtocolError(f"dense_rows has the shape {shape}; it must be rows times vocabulary")
    return tuple(DenseRow(logits) for logits in logits_from_tensor(tensor, "dense_rows"))


def _support_row_to_proto(row: SupportRow) -> target_pb2.SupportRow:
    statistics = row.statistics
    return target_pb2.SupportRow(
        probabilities=floats_to_bytes(row.probs),
        outside_mass=row.outside_mass,
        outside_token_id=row.outside_token_id,
        statistics=None
        if statistics is None
        else target_pb2.RowStatistics(
            entropy=statistics.entropy,
            max_probability=statistics.max_prob,
            argmax_token_id=statistics.argmax_token_id,
            ranks=statistics.ranks.tolist(),
            logits=floats_to_bytes(statistics.logits),
        ),
        outside_probability=row.outside_prob,
    )


def _support_row_from_proto(message: target_pb2.SupportRow, support: IntArray) -> SupportRow:
    return SupportRow(
        token_ids=support,
        probs=floats_from_bytes(message.probabilities, len(support), "a support row").astype(float),
        outside_mass=message.outside_mass,
        outside_token_id=message.outside_token_id,
        statistics=_statistics_from_proto(message.statistics, support)
        if message.HasField("statistics")
        else None,
        outside_prob=message.outside_probability if message.HasField("outside_probability") else None,
    )


def _statistics_from_proto(message: target_pb2.RowStatistics, support: IntArray) -> RowStatistics:
    if len(message.ranks) != len(support):
        raise ProtocolError(f"{len(message.ranks)} ranks came for a support of {len(support)} tokens")
    return RowStatistics(
        entropy=message.entropy,
        max_prob=message.max_probability,
        argmax_token_id=message.argmax_token_id,
        ranks=ids_to_array(message.ranks),
        logits=floats_from_bytes(message.logits, len(support), "a row's logits"),
    )
