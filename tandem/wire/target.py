"""Changes that a request makes to the target's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_LOGIT_BIAS,
    DenseRow,
    Float32Array,
    FloatArray,
    IntArray,
    LogitAdjustments,
    RowKind,
    RowStatistics,
    StepCost,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2, types_pb2
from tandem.v1.target_pb2 import RowColumns
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


def adjustments_to_proto(adjustments: LogitAdjustments) -> target_pb2.LogitAdjustments | None:
    """Adjustments as a message; None where there are none."""
    if not adjustments:
        return None
    return target_pb2.LogitAdjustments(
        biases=adjustments.biases,
        min_tokens=adjustments.min_tokens,
        suppressed_token_ids=adjustments.suppressed_token_ids,
    )


def adjustments_from_proto(message: target_pb2.LogitAdjustments) -> LogitAdjustments:
    """The adjustments of a message.

    Raises:
        InvalidRequestError: a number is out of its range.
    """
    if message.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {message.min_tokens}; it must be at least 0")
    for token_id, bias in message.biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"the bias of token {token_id} is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and "
                f"{MAX_LOGIT_BIAS:g}"
            )
    return LogitAdjustments(dict(message.biases), message.min_tokens, tuple(message.suppressed_token_ids))


_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


def columns_to_proto(rows: Sequence[TargetRow]) -> RowColumns | None:
    """The rows of one sequence as columns; None for rows that are none of one form: dense ones, or none at all."""
    tokens = [row.token_id for row in rows if isinstance(row, TokenRow)]
    supports = [row for row in rows if isinstance(row, SupportRow)]
    if not rows or len(rows) not in (len(tokens), len(supports)):
        return None
    if tokens:
        return RowColumns(token_ids=ints_to_bytes(tokens))
    statistics = [row.statistics for row in supports if row.statistics is not None]
    outside_probs = [row.outside_prob for row in supports if row.outside_prob is not None]
    if not {len(statistics), len(outside_probs)} <= {0, len(rows)}:
        return None
    columns = RowColumns(
        support_sizes=ints_to_bytes([len(row.probs) for row in supports]),
        probabilities=floats_to_bytes(np.concatenate([row.probs for row in supports])),
        outside_masses=_floats([row.outside_mass for row in supports]),
        outside_token_ids=ints_to_bytes([row.outside_token_id for row in supports]),
        outside_probabilities=_floats(outside_probs),
    )
    if statistics:
        columns.entropies = _floats([each.entropy for each in statistics])
        columns.max_probabilities = _floats([each.max_prob for each in statistics])
        columns.argmax_token_ids = ints_to_bytes([each.argmax_token_id for each in statistics])
        columns.ranks = np.concatenate([each.ranks for each in statistics]).astype("<i4").tobytes()
        columns.logits = floats_to_bytes(np.concatenate([each.logits for each in statistics]))
    return columns


def form(columns: RowColumns) -> tuple[bool, bool, bool]:
    """Which columns there are. Only columns of the same form can be joined."""
    return bool(columns.token_ids), bool(columns.outside_probabilities), bool(columns.entropies)


class RowBlock:
    """The rows of one message, those of all its sequences."""

    def __init__(self, message: RowColumns) -> None:
        """Read the columns.

        Raises:
            ProtocolError: they do not fit together.
        """
        self._rows: Callable[[int, int, Sequence[IntArray]], tuple[TargetRow, ...]]
        if message.token_ids:
            self.kind = RowKind.TOKEN
            self.count = len(message.token_ids) // 4
            tokens = ints_from_bytes(message.token_ids, self.count, "the column of token rows")
            self._rows = lambda start, stop, _: tuple(map(TokenRow, tokens[start:stop]))
        else:
            self.kind = RowKind.SUPPORT
            supports = _SupportColumns.read(message)
            self.count = len(supports.outside_masses)
            self._rows = supports.rows

    def rows(self, start: int, stop: int, step: VerifyStep) -> tuple[TargetRow, ...]:
        """The rows from `start` to before `stop`, which answer `step`.

        Raises:
            ProtocolError: they are of another kind, or about other supports.
        """
        if self.kind is not step.row_kind:
            raise ProtocolError(
                f"{self.kind.value}_rows came where {step.row_kind.value} rows were requested"
            )
        padding = (_EMPTY_SUPPORT,) * (stop - start - len(step.supports))
        return self._rows(start, stop, (*step.supports, *padding))


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class ColumnAnswer:
    """A sequence's verification within a block."""

    base_length: int
    cost: StepCost | None
    block: RowBlock
    start: int
    stop: int

    def rows(self, step: VerifyStep) -> tuple[TargetRow, ...]:
        """See `RowBlock.rows`."""
        return self.block.rows(self.start, self.stop, step)


@dataclass(frozen=True, slots=True, eq=False)
class _SupportColumns:
    """R support rows with N ids."""

    bounds: list[tuple[int, int]]
    """Where the ids of each row begin and end, R."""
    probs: FloatArray
    """Shape [N]."""
    outside_masses: list[float]
    outside_token_ids: list[int]
    outside_probs: list[float] | None
    statistics: _StatisticsColumns | None

    @staticmethod
    def read(message: RowColumns) -> _SupportColumns:
        sizes = sizes_from_bytes(message.support_sizes, "the column of support sizes")
        count, total = len(sizes), sum(sizes)
        outside = message.outside_probabilities
        return _SupportColumns(
            list(pairwise(accumulate(sizes, initial=0))),
            floats_from_bytes(message.probabilities, total, "the column of support rows").astype(float),
            floats_from_bytes(message.outside_masses, count, "the column of outside masses").tolist(),
            ints_from_bytes(message.outside_token_ids, count, "the column of outside tokens"),
            floats_from_bytes(outside, count, "the column of outside probabilities").tolist()
            if outside
            else None,
            _StatisticsColumns.read(message, count, total) if message.entropies else None,
        )

    def rows(self, start: int, stop: int, supports: Sequence[IntArray]) -> tuple[SupportRow, ...]:
        bounds, statistics = self.bounds[start:stop], self.statistics
        for (first, last), support in zip(bounds, supports, strict=False):
            if last - first != len(support):
                raise ProtocolError(
                    f"a support row holds {4 * (last - first)} bytes; it must hold {4 * len(support)} for "
                    f"{len(support)} values"
                )
        return tuple(
            SupportRow(
                support,
                self.probs[first:last],
                outside_mass,
                outside_token_id,
                None if statistics is None else statistics.of_row(start + i, first, last),
                outside_prob,
            )
            for i, (support, (first, last), outside_mass, outside_token_id, outside_prob) in enumerate(
                zip(
                    supports,
                    bounds,
                    self.outside_masses[start:stop],
                    self.outside_token_ids[start:stop],
                    repeat(None) if self.outside_probs is None else self.outside_probs[start:stop],
                    strict=False,
                )
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _StatisticsColumns:
    """Statistics of R rows with N ids."""

    entropies: list[float]
    max_probs: list[float]
    argmax_token_ids: list[int]
    ranks: IntArray
    """Shape [N]."""
    logits: Float32Array
    """Shape [N]."""

    @staticmethod
    def read(message: RowColumns, count: int, total: int) -> _StatisticsColumns:
        ranks = ints_from_bytes(message.ranks, total, "the column of ranks")
        return _StatisticsColumns(
            floats_from_bytes(message.entropies, count, "the column of entropies").tolist(),
            floats_from_bytes(
                message.max_probabilities, count, "the column of highest probabilities"
            ).tolist(),
            ints_from_bytes(message.argmax_token_ids, count, "the column of argmax tokens"),
            np.array(ranks, dtype=np.int64),
            floats_from_bytes(message.logits, total, "the column of logits"),
        )

    def of_row(self, row: int, first: int, last: int) -> RowStatistics:
        return RowStatistics(
            self.entropies[row],
            self.max_probs[row],
            self.argmax_token_ids[row],
            self.ranks[first:last],
            self.logits[first:last],
        )


def _floats(values: list[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


Answer: TypeAlias = "target_pb2.VerifyResponse | ColumnAnswer"
"""A verification as it came: in a message of its own, or within one for several sequences."""


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
