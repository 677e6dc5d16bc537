"""TargetService: verifications and what asks for them."""

from __future__ import annotations

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_LOGIT_BIAS,
    DenseRow,
    IntArray,
    LogitAdjustments,
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
            logit_adjustments=_adjustments_to_proto(options.adjustments),
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
        _adjustments_from_proto(message.logit_adjustments),
    )


def _adjustments_to_proto(adjustments: LogitAdjustments) -> target_pb2.LogitAdjustments | None:
    if not adjustments:
        return None
    return target_pb2.LogitAdjustments(
        biases=adjustments.biases,
        min_tokens=adjustments.min_tokens,
        suppressed_token_ids=adjustments.suppressed_token_ids,
    )


def _adjustments_from_proto(message: target_pb2.LogitAdjustments) -> LogitAdjustments:
    if message.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {message.min_tokens}; it must be at least 0")
    for token_id, bias in message.biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"the bias of token {token_id} is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and "
                f"{MAX_LOGIT_BIAS:g}"
            )
    return LogitAdjustments(dict(message.biases), message.min_tokens, tuple(message.suppressed_token_ids))


def step_to_proto(step: VerifyStep) -> target_pb2.VerifyRequest:
    """The message that asks for rows."""
    return target_pb2.VerifyRequest(
        step=target_pb2.VerifyStep(
            delta=delta_to_proto(step.delta),
            row_kind=row_kind_to_proto(step.row_kind),
            row_count=step.row_count,
            supports=[target_pb2.Support(token_ids=support.tolist()) for support in step.supports],
            with_statistics=step.with_statistics,
            raced_recovery=step.raced_recovery,
        )
    )


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


def finish_to_proto() -> target_pb2.VerifyRequest:
    """The message that ends a sequence."""
    return target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish())


def verification_to_proto(verification: Verification) -> target_pb2.VerifyResponse:
    """A verification as a message."""
    response = target_pb2.VerifyResponse(
        base_length=verification.base_length, cost=cost_to_proto(verification.cost)
    )
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


def verification_from_proto(message: target_pb2.VerifyResponse, step: VerifyStep) -> Verification:
    """The verification that answers `step`.

    Raises:
        ProtocolError: it does not have the rows that were requested.
    """
    rows = _rows_from_proto(message, step)
    if len(rows) != step.row_count:
        raise ProtocolError(f"{len(rows)} rows came for {step.row_count} that were requested")
    cost = cost_from_proto(message.cost) if message.HasField("cost") else None
    return Verification(message.base_length, rows, cost)


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
