"""TargetService: verifications and what asks for them, for many sequences in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_LOGIT_BIAS,
    Cancel,
    DenseRow,
    Finish,
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
from tandem.v1 import target_pb2
from tandem.wire.columns import (
    HEADER_BYTES,
    Answered,
    bounds,
    counts_to_bytes,
    deltas_from_proto,
    deltas_to_proto,
    floats_from_bytes,
    floats_to_bytes,
    heads_from_proto,
    heads_to_proto,
    ids_from_bytes,
    ids_to_bytes,
    ints_from_bytes,
    ints_to_bytes,
    numbers_from_bytes,
    numbers_to_bytes,
    sizes_from_bytes,
    split,
)
from tandem.wire.common import (
    check_delta,
    logits_from_tensor,
    logits_to_tensor,
    row_kind_from_proto,
    row_kind_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from tandem.wire.status import Ending, ending_from_proto, ending_to_proto

Request: TypeAlias = TargetOptions | VerifyStep | Finish | Cancel
"""What a coordinator says of one sequence."""

_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_NAMES = {RowKind.TOKEN: "token_rows", RowKind.SUPPORT: "support_rows", RowKind.DENSE: "dense_rows"}
_KINDS = {name: kind for kind, name in _NAMES.items()}


# ---- what asks for verifications


def requests_to_proto(requests: Iterable[tuple[int, Request]]) -> target_pb2.VerifyRequest:
    """A message for sequences by number. Of one sequence, an Open precedes its steps and these its end."""
    message = target_pb2.VerifyRequest()
    steps: list[tuple[int, VerifyStep]] = []
    for sequence, request in requests:
        if isinstance(request, VerifyStep):
            steps.append((sequence, request))
        elif isinstance(request, TargetOptions):
            message.opens.append(_options_to_proto(sequence, request))
        elif isinstance(request, Finish):
            message.finishes.add(sequence=sequence, token_count=request.token_count)
        else:
            message.cancelled_sequences.append(sequence)
    if steps:
        _steps_to_proto(message.steps, steps)
    return message


def requests_from_proto(
    message: target_pb2.VerifyRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """What a message says of sequences, by number; an error in place of what is out of its range.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    for opening in message.opens:
        try:
            yield opening.sequence, _options_from_proto(opening)
        except InvalidRequestError as error:
            yield opening.sequence, error
    if message.HasField("steps"):
        yield from _steps_from_proto(message.steps)
    for finish in message.finishes:
        yield finish.sequence, Finish(finish.token_count)
    for sequence in message.cancelled_sequences:
        yield sequence, Cancel()


def request_size(request: Request) -> int:
    """About how many bytes it adds to a message."""
    if not isinstance(request, VerifyStep):
        return HEADER_BYTES
    return HEADER_BYTES + 4 * (len(request.delta.token_ids) + sum(map(len, request.supports)))


def _options_to_proto(sequence: int, options: TargetOptions) -> target_pb2.VerifyOpen:
    adjustments = options.adjustments
    return target_pb2.VerifyOpen(
        sequence=sequence,
        request_id=options.request_id,
        sampling=sampling_to_proto(options.sampling),
        max_length=options.max_length,
        prompt_token_count=options.prompt_length,
        logit_adjustments=target_pb2.LogitAdjustments(
            biases=adjustments.biases,
            min_tokens=adjustments.min_tokens,
            suppressed_token_ids=adjustments.suppressed_token_ids,
        )
        if adjustments
        else None,
        traceparent=options.traceparent,
        client=options.client,
    )


def _options_from_proto(message: target_pb2.VerifyOpen) -> TargetOptions:
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
        message.client,
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


def _steps_to_proto(message: target_pb2.VerifySteps, numbered: Sequence[tuple[int, VerifyStep]]) -> None:
    steps = [step for _, step in numbered]
    deltas_to_proto(message.deltas, ((sequence, step.delta) for sequence, step in numbered))
    message.row_kinds = ints_to_bytes([row_kind_to_proto(step.row_kind) for step in steps])
    message.row_counts = ints_to_bytes([step.row_count for step in steps])
    message.with_statistics = counts_to_bytes([step.with_statistics for step in steps])
    supports: list[IntArray] = []
    for step in steps:
        if step.row_kind is RowKind.SUPPORT:
            supports += step.supports
            supports += [_EMPTY_SUPPORT] * (step.row_count - len(step.supports))
    if supports:
        message.support_sizes = ints_to_bytes([len(support) for support in supports])
        message.support_ids = ids_to_bytes(supports)


def _steps_from_proto(
    message: target_pb2.VerifySteps,
) -> Iterator[tuple[int, VerifyStep | InvalidRequestError]]:
    deltas = deltas_from_proto(message.deltas)
    count = len(deltas)
    kinds = ints_from_bytes(message.row_kinds, count, "the column of row kinds")
    row_counts = ints_from_bytes(message.row_counts, count, "the column of row counts", may_lack=True)
    statistics = ints_from_bytes(message.with_statistics, count, "the column of statistics", may_lack=True)
    has_supports = row_kind_to_proto(RowKind.SUPPORT)
    support_counts = [
        max(rows, 0) if kind == has_supports else 0 for kind, rows in zip(kinds, row_counts, strict=True)
    ]
    supports: list[IntArray] = []
    if any(support_counts):
        sizes = sizes_from_bytes(message.support_sizes, "the column of support sizes", sum(support_counts))
        ids = ids_from_bytes(message.support_ids, sum(sizes), "the column of support ids")
        supports = [ids[start:stop] for start, stop in bounds(sizes, len(ids), "the supports")]
    columns = zip(deltas, kinds, row_counts, statistics, split(supports, support_counts), strict=True)
    for (sequence, delta), kind, rows, with_statistics, own in columns:
        try:
            check_delta(delta)
            if rows < 0:
                raise InvalidRequestError(f"row_count is {rows}; it must be at least 0")
            step = VerifyStep(
                delta,
                row_kind_from_proto(kind),
                rows,
                tuple(own),
                bool(with_statistics),
            )
        except InvalidRequestError as error:
            yield sequence, error
        else:
            yield sequence, step


# ---- verifications


def answers_to_proto(answers: Iterable[tuple[int, Verification | Ending]]) -> target_pb2.VerifyResponse:
    """A message of answers to sequences by number; those of one form become one block."""
    message = target_pb2.VerifyResponse()
    forms: dict[tuple[RowKind, bool], list[tuple[int, Verification]]] = {}
    for sequence, answer in answers:
        if isinstance(answer, Ending):
            message.ends.append(ending_to_proto(sequence, answer))
        else:
            forms.setdefault(_form(answer.rows), []).append((sequence, answer))
    for (kind, _), block in forms.items():
        columns = message.verifications.add()
        heads_to_proto(columns.answers, ((number, each.base_length, each.cost) for number, each in block))
        columns.row_counts = ints_to_bytes([len(each.rows) for _, each in block])
        _WRITERS[kind](columns, [row for _, each in block for row in each.rows])
    return message


def answer_size(answer: Verification | Ending) -> int:
    """About how many bytes it adds to a message."""
    if isinstance(answer, Ending):
        return HEADER_BYTES
    size = HEADER_BYTES
    for row in answer.rows:
        if isinstance(row, DenseRow):
            size += 4 * row.logits.size
        else:
            size += 16 if isinstance(row, TokenRow) else 20 + 4 * row.probs.size
    return size


def _form(rows: Sequence[TargetRow]) -> tuple[RowKind, bool]:
    first = rows[0] if rows else None
    if isinstance(first, SupportRow):
        return RowKind.SUPPORT, first.statistics is not None
    return (RowKind.DENSE if isinstance(first, DenseRow) else RowKind.TOKEN), False


def _write_tokens(message: target_pb2.VerificationColumns, rows: Sequence[TargetRow]) -> None:
    tokens = [row.token_id for row in rows if isinstance(row, TokenRow)]
    message.token_rows.token_ids = ints_to_bytes(tokens)


def _write_dense(message: target_pb2.VerificationColumns, rows: Sequence[TargetRow]) -> None:
    logits = np.stack([row.logits for row in rows if isinstance(row, DenseRow)])
    message.dense_rows.CopyFrom(logits_to_tensor(logits))


def _write_supports(message: target_pb2.VerificationColumns, all_rows: Sequence[TargetRow]) -> None:
    columns = message.support_rows
    rows = [row for row in all_rows if isinstance(row, SupportRow)]
    columns.support_sizes = ints_to_bytes([len(row.probs) for row in rows])
    columns.probabilities = floats_to_bytes(np.concatenate([row.probs for row in rows]))
    columns.outside_masses = numbers_to_bytes([row.outside_mass for row in rows])
    columns.outside_token_ids = ints_to_bytes([row.outside_token_id for row in rows])
    columns.outside_probabilities = numbers_to_bytes([row.outside_prob or 0.0 for row in rows])
    statistics = [row.statistics for row in rows if row.statistics is not None]
    if statistics:
        columns.statistics.entropies = numbers_to_bytes([each.entropy for each in statistics])
        columns.statistics.max_probabilities = numbers_to_bytes([each.max_prob for each in statistics])
        columns.statistics.argmax_token_ids = ints_to_bytes([each.argmax_token_id for each in statistics])
        columns.statistics.ranks = ids_to_bytes([each.ranks for each in statistics])
        columns.statistics.logits = floats_to_bytes(np.concatenate([each.logits for each in statistics]))


_WRITERS: dict[RowKind, Callable[[target_pb2.VerificationColumns, Sequence[TargetRow]], None]] = {
    RowKind.TOKEN: _write_tokens,
    RowKind.SUPPORT: _write_supports,
    RowKind.DENSE: _write_dense,
}


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Answer:
    """A sequence's verification within a block."""

    base_length: int
    cost: StepCost | None
    block: RowBlock
    start: int
    stop: int

    def verification(self, step: VerifyStep) -> Verification:
        """The verification that answers `step`.

        Raises:
            ProtocolError: it does not have the rows that were requested.
        """
        return Verification(self.base_length, self.block.rows(self.start, self.stop, step), self.cost)


def answers_from_proto(message: target_pb2.VerifyResponse) -> Iterator[Answered[Answer | Ending]]:
    """The answers of a message.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    for columns in message.verifications:
        block = RowBlock(columns)
        heads = heads_from_proto(columns.answers)
        counts = sizes_from_bytes(columns.row_counts, "the column of row counts", len(heads))
        share = columns.ByteSize() // max(len(heads), 1)
        for (sequence, base_length, cost), (start, stop) in zip(
            heads, bounds(counts, block.count, "a block of rows"), strict=True
        ):
            yield Answered(sequence, Answer(base_length, cost, block, start, stop), share)
    for end in message.ends:
        yield Answered(end.sequence, ending_from_proto(end), end.ByteSize())


class RowBlock:
    """The rows of one kind in a message, those of all its sequences."""

    def __init__(self, message: target_pb2.VerificationColumns) -> None:
        """Read the columns.

        Raises:
            ProtocolError: they do not fit together.
        """
        self.kind = _KINDS[message.WhichOneof("rows") or "token_rows"]
        self._rows: Callable[[int, int, Sequence[IntArray]], tuple[TargetRow, ...]]
        if self.kind is RowKind.TOKEN:
            data = message.token_rows.token_ids
            tokens = ints_from_bytes(data, len(data) // 4, "the column of token rows")
            self.count = len(tokens)
            self._rows = lambda start, stop, _: tuple(map(TokenRow, tokens[start:stop]))
        elif self.kind is RowKind.DENSE:
            shape = tuple(message.dense_rows.shape)
            if len(shape) != 2 or min(shape) < 0:
                raise ProtocolError(f"dense_rows has the shape {shape}; it must be rows times vocabulary")
            logits = logits_from_tensor(message.dense_rows, "dense_rows")
            self.count = len(logits)
            self._rows = lambda start, stop, _: tuple(map(DenseRow, logits[start:stop]))
        else:
            supports = _Supports(message.support_rows)
            self.count = supports.count
            self._rows = supports.rows

    def rows(self, start: int, stop: int, step: VerifyStep) -> tuple[TargetRow, ...]:
        """The rows from `start` to before `stop`, which answer `step`.

        Raises:
            ProtocolError: they are of another kind or number, or about other supports.
        """
        if stop - start != step.row_count:
            raise ProtocolError(f"{stop - start} rows came for {step.row_count} that were requested")
        if self.kind is not step.row_kind and step.row_count:
            raise ProtocolError(
                f"{self.kind.value}_rows came where {step.row_kind.value} rows were requested"
            )
        supports = step.supports
        if self.kind is RowKind.SUPPORT and len(supports) < step.row_count:
            supports = (*supports, *(_EMPTY_SUPPORT,) * (step.row_count - len(supports)))
        return self._rows(start, stop, supports)


class _Supports:
    """Support rows of a message."""

    def __init__(self, message: target_pb2.SupportRows) -> None:
        sizes = sizes_from_bytes(message.support_sizes, "the column of support sizes")
        self.count, total = len(sizes), sum(sizes)
        self._bounds = bounds(sizes, total, "the column of supports")
        self._probs: FloatArray = floats_from_bytes(
            message.probabilities, total, "the column of support rows"
        ).astype(float)
        self._outside_masses = _floats(message.outside_masses, self.count, "outside masses")
        self._outside_token_ids = ints_from_bytes(
            message.outside_token_ids, self.count, "the column of outside tokens"
        )
        self._outside_probs = _floats(message.outside_probabilities, self.count, "outside probabilities")
        self._statistics = (
            _Statistics(message.statistics, self.count, total) if message.HasField("statistics") else None
        )

    def rows(self, start: int, stop: int, supports: Sequence[IntArray]) -> tuple[SupportRow, ...]:
        own, statistics = self._bounds[start:stop], self._statistics
        for (first, last), support in zip(own, supports, strict=True):
            if last - first != len(support):
                raise ProtocolError(
                    f"a support row of {last - first} ids came for a support of {len(support)}"
                )
        return tuple(
            map(
                SupportRow,
                supports,
                [self._probs[first:last] for first, last in own],
                self._outside_masses[start:stop],
                self._outside_token_ids[start:stop],
                repeat(None)
                if statistics is None
                else [statistics.of_row(start + i, *each) for i, each in enumerate(own)],
                self._outside_probs[start:stop],
            )
        )


class _Statistics:
    """Statistics of the support rows of a message."""

    def __init__(self, message: target_pb2.StatisticsColumns, count: int, total: int) -> None:
        self._entropies = _floats(message.entropies, count, "entropies")
        self._max_probs = _floats(message.max_probabilities, count, "highest probabilities")
        self._argmax_token_ids = ints_from_bytes(
            message.argmax_token_ids, count, "the column of argmax tokens"
        )
        self._ranks: IntArray = ids_from_bytes(message.ranks, total, "the column of ranks")
        self._logits: Float32Array = floats_from_bytes(message.logits, total, "the column of logits")

    def of_row(self, row: int, first: int, last: int) -> RowStatistics:
        return RowStatistics(
            self._entropies[row],
            self._max_probs[row],
            self._argmax_token_ids[row],
            self._ranks[first:last],
            self._logits[first:last],
        )


def _floats(data: bytes, count: int, what: str) -> list[float]:
    return numbers_from_bytes(data, count, f"the column of {what}")
