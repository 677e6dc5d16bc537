"""TargetService: verifications and what asks for them, for many sequences in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    MAX_LEAD,
    MAX_LOGIT_BIAS,
    Cancel,
    Delta,
    DenseRow,
    DraftedOutcomes,
    Finish,
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
from tandem.v1.types_pb2 import Tensor
from tandem.wire.columns import (
    answers_from_bytes,
    answers_to_bytes,
    bounds,
    floats_from_bytes,
    floats_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
    ints_from_bytes,
    ints_to_bytes,
    records_from_bytes,
    split,
)
from tandem.wire.common import (
    check_delta,
    logits_from_tensor,
    logits_to_tensor,
    read_requests,
    row_kind_from_proto,
    row_kind_to_proto,
    write_requests,
)
from tandem.wire.draft import outcomes_from_proto, outcomes_to_proto
from tandem.wire.mirror import Mirror
from tandem.wire.status import Ending, ending_from_proto, ending_to_proto

Request: TypeAlias = TargetOptions | VerifyStep | DraftedOutcomes | Finish | Cancel
"""A coordinator's message part for one sequence."""

_STEP = Struct("<9i")
"""Sequence, base length, number of token ids, row kind, row count, 1 with statistics, lead, fewest proposed tokens,
1 for alone after a miss."""
_SUPPORT_ROW = Struct("<ifif")
"""Ids of the support, mass outside, the sample from outside, its probability."""
_STATISTICS = Struct("<ffi")
"""Entropy, maximum probability, argmax."""
_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_HAS_SUPPORTS = row_kind_to_proto(RowKind.SUPPORT)

Mirror(LogitAdjustments, target_pb2.LogitAdjustments)
_OPTIONS = Mirror(
    TargetOptions,
    target_pb2.VerifyOpen,
    prompt_length="prompt_token_count",
    adjustments="logit_adjustments",
)


# ---- what asks for verifications


def requests_to_proto(requests: Iterable[tuple[int, Request]]) -> target_pb2.VerifyRequest:
    """A message for sequences by number; see `write_requests`."""
    message = target_pb2.VerifyRequest()
    requests = list(requests)
    if outcomes := [(number, each) for number, each in requests if isinstance(each, DraftedOutcomes)]:
        outcomes_to_proto(message.outcomes, outcomes)
        requests = [each for each in requests if not isinstance(each[1], DraftedOutcomes)]
    if steps := write_requests(message, requests, VerifyStep, _OPTIONS):
        _steps_to_proto(message.steps, steps)
    return message


def requests_from_proto(
    message: target_pb2.VerifyRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """The requests of a message, by number of their sequence; an error in place of one that is out of range."""
    yield from read_requests(message, _options_from_proto, _steps_from_proto)
    if message.HasField("outcomes"):
        for sequence, drafted in outcomes_from_proto(message.outcomes):
            yield sequence, _checked(drafted)


def _checked(drafted: DraftedOutcomes) -> DraftedOutcomes | InvalidRequestError:
    depth = drafted.depth + len(drafted.lead_token_ids)
    if not 0 <= drafted.depth <= depth < MAX_AHEAD_TOKENS or len(drafted.token_ids) > MAX_BRANCHES:
        return InvalidRequestError(
            f"{len(drafted.token_ids)} outcomes came at depth {depth}; there must be at most {MAX_BRANCHES}, and "
            f"depths must be in 0..{MAX_AHEAD_TOKENS - 1}"
        )
    return drafted


def _options_from_proto(message: target_pb2.VerifyOpen) -> TargetOptions:
    options = _OPTIONS.from_proto(message)
    adjustments = options.adjustments
    if options.prompt_length < 0:
        raise InvalidRequestError(f"prompt_token_count is {options.prompt_length}; it must be at least 0")
    if adjustments.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {adjustments.min_tokens}; it must be at least 0")
    for token_id, bias in adjustments.biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"the bias of token {token_id} is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and "
                f"{MAX_LOGIT_BIAS:g}"
            )
    return options


def _steps_to_proto(message: target_pb2.VerifySteps, numbered: Sequence[tuple[int, VerifyStep]]) -> None:
    records: list[bytes] = []
    token_ids: list[int] = []
    supports: list[IntArray] = []
    for sequence, step in numbered:
        delta = step.delta
        kind, rows = row_kind_to_proto(step.row_kind), step.row_count
        records.append(
            _STEP.pack(
                sequence,
                delta.base_length,
                len(delta.token_ids),
                kind,
                rows,
                step.with_statistics,
                step.lead,
                step.min_proposed,
                step.alone_after_miss,
            )
        )
        token_ids += delta.token_ids
        if step.row_kind is RowKind.SUPPORT:
            supports += step.supports
            supports += [_EMPTY_SUPPORT] * (rows - len(step.supports))
    message.records = b"".join(records)
    message.token_ids = ints_to_bytes(token_ids)
    if supports:
        message.support_sizes = ints_to_bytes([len(support) for support in supports])
        message.support_ids = ids_to_bytes(supports)


def _steps_from_proto(
    message: target_pb2.VerifySteps,
) -> Iterator[tuple[int, VerifyStep | InvalidRequestError]]:
    records = records_from_bytes(_STEP, message.records, "the column of steps")
    deltas = split(message.token_ids, [record[2] for record in records], "the column of token ids")
    supports = iter(_supports_from_proto(message, records))
    for record, token_ids in zip(records, deltas, strict=True):
        sequence, base_length, _, kind, rows, statistics, lead, min_proposed, alone = record
        own = tuple(islice(supports, max(rows, 0))) if kind == _HAS_SUPPORTS else ()
        try:
            delta = Delta(base_length, token_ids)
            check_delta(delta)
            if rows < 0:
                raise InvalidRequestError(f"row_count is {rows}; it must be at least 0")
            if not 0 <= lead <= MAX_LEAD:
                raise InvalidRequestError(f"lead is {lead}; it must be from 0 to {MAX_LEAD}")
            row_kind = row_kind_from_proto(kind)
            yield (
                sequence,
                VerifyStep(delta, row_kind, rows, own, bool(statistics), lead, min_proposed, bool(alone)),
            )
        except InvalidRequestError as error:
            yield sequence, error


def _supports_from_proto(message: target_pb2.VerifySteps, records: Sequence[Any]) -> list[IntArray]:
    count = sum([max(record[4], 0) for record in records if record[3] == _HAS_SUPPORTS])
    if not count:
        return []
    sizes = ints_from_bytes(message.support_sizes, "the column of support sizes")
    if len(sizes) != count:
        raise ProtocolError(f"{len(sizes)} supports came for {count} rows")
    ids = ids_from_bytes(message.support_ids, "the column of support ids")
    return [ids[start:stop] for start, stop in bounds(sizes, len(ids), "the column of support ids")]


# ---- verifications


def answers_to_proto(answers: Iterable[tuple[int, Verification | Ending]]) -> target_pb2.VerifyResponse:
    """A message of answers to sequences by number; those of one form become one block."""
    message = target_pb2.VerifyResponse()
    forms: dict[tuple[type[TargetRow], bool], list[tuple[int, Verification]]] = {}
    for sequence, answer in answers:
        if isinstance(answer, Ending):
            message.ends.append(ending_to_proto(sequence, answer))
        else:
            forms.setdefault(_form(answer.rows), []).append((sequence, answer))
    for (kind, _), block in forms.items():
        columns = message.verifications.add()
        columns.records = answers_to_bytes((number, each, len(each.rows)) for number, each in block)
        led = [each.led_token_id for _, each in block]
        if max(led) >= 0:
            columns.led_token_ids = ints_to_bytes(led)
        proposed = [each.next_proposed for _, each in block]
        if max(proposed) >= 0:
            columns.next_proposed_counts = ints_to_bytes(proposed)
        rows: list[Any] = [row for _, each in block for row in each.rows]
        if kind is TokenRow:
            columns.token_rows.token_ids = ints_to_bytes([row.token_id for row in rows])
        elif kind is DenseRow:
            columns.dense_rows.CopyFrom(logits_to_tensor(np.stack([row.logits for row in rows])))
        else:
            _supports_to_proto(columns.support_rows, rows)
    return message


def _form(rows: Sequence[TargetRow]) -> tuple[type[TargetRow], bool]:
    first = rows[0] if rows else None
    if isinstance(first, SupportRow):
        return SupportRow, first.statistics is not None
    return (DenseRow if isinstance(first, DenseRow) else TokenRow), False


def _supports_to_proto(columns: target_pb2.SupportRows, rows: Sequence[SupportRow]) -> None:
    columns.records = b"".join(
        [
            _SUPPORT_ROW.pack(len(row.probs), row.outside_mass, row.outside_token_id, row.outside_prob or 0.0)
            for row in rows
        ]
    )
    columns.probabilities = floats_to_bytes(np.concatenate([row.probs for row in rows]))
    statistics = [row.statistics for row in rows if row.statistics is not None]
    if statistics:
        columns.statistics.records = b"".join(
            [_STATISTICS.pack(each.entropy, each.max_prob, each.argmax_token_id) for each in statistics]
        )
        columns.statistics.ranks = ids_to_bytes([each.ranks for each in statistics])
        columns.statistics.logits = floats_to_bytes(np.concatenate([each.logits for each in statistics]))


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Answer:
    """A sequence's verification within a block."""

    base_length: int
    cost: StepCost | None
    block: RowBlock
    start: int
    stop: int
    led_token_id: int = -1
    next_proposed: int = -1

    def verification(self, step: VerifyStep) -> Verification:
        """The verification that answers `step`."""
        count, kind = self.stop - self.start, self.block.kind
        if count != step.row_count:
            raise ProtocolError(f"{count} rows came for {step.row_count} that were requested")
        if kind is not step.row_kind and count:
            raise ProtocolError(f"{kind.value}_rows came where {step.row_kind.value} rows were requested")
        rows = self.block.rows(self.start, self.stop, step.supports)
        return Verification(self.base_length, rows, self.cost, self.led_token_id, self.next_proposed)


def answers_from_proto(message: target_pb2.VerifyResponse) -> Iterator[tuple[int, Answer | Ending]]:
    """The answers of a message, by number of the sequence."""
    for columns in message.verifications:
        block = _read_block(columns)
        records = list(answers_from_bytes(columns.records))
        led = _optional(columns.led_token_ids, "led tokens", len(records))
        proposed = _optional(columns.next_proposed_counts, "next proposed counts", len(records))
        spans = bounds([count for _, _, count, _ in records], block.count, "the column of rows")
        for (sequence, base_length, _, cost), span, *ahead in zip(records, spans, led, proposed, strict=True):
            yield sequence, Answer(base_length, cost, block, *span, *ahead)
    for end in message.ends:
        yield end.sequence, ending_from_proto(end)


def _optional(column: bytes, what: str, count: int) -> tuple[int, ...]:
    """A column with a value for each record; -1 for each where it is empty."""
    values = ints_from_bytes(column, f"the column of {what}") or (-1,) * count
    if len(values) != count:
        raise ProtocolError(f"{len(values)} {what} came for {count} verifications")
    return values


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of one kind in a message, those of all its sequences."""

    kind: RowKind
    count: int
    rows: Callable[[int, int, Sequence[IntArray]], tuple[TargetRow, ...]]
    """Rows from one number to below another, of these supports. Raises ProtocolError where a support does not fit."""


def _read_block(columns: target_pb2.VerificationColumns) -> RowBlock:
    match columns.WhichOneof("rows"):
        case "support_rows":
            return _support_rows(columns.support_rows)
        case "dense_rows":
            return _dense_rows(columns.dense_rows)
        case _:
            ids = ints_from_bytes(columns.token_rows.token_ids, "the column of token rows")
            return RowBlock(
                RowKind.TOKEN, len(ids), lambda start, stop, _: tuple(map(TokenRow, ids[start:stop]))
            )


def _dense_rows(message: Tensor) -> RowBlock:
    shape = tuple(message.shape)
    if len(shape) != 2 or min(shape) < 0:
        raise ProtocolError(f"dense_rows has the shape {shape}; it must be rows times vocabulary")
    logits = logits_from_tensor(message, "dense_rows")
    return RowBlock(
        RowKind.DENSE, len(logits), lambda start, stop, _: tuple(map(DenseRow, logits[start:stop]))
    )


def _support_rows(message: target_pb2.SupportRows) -> RowBlock:
    records = records_from_bytes(_SUPPORT_ROW, message.records, "the column of support rows")
    probs = floats_from_bytes(message.probabilities, "the column of probabilities").astype(float)
    spans = bounds([record[0] for record in records], len(probs), "the column of probabilities")
    statistics = _statistics(message.statistics, spans) if message.HasField("statistics") else None

    def rows(start: int, stop: int, supports: Sequence[IntArray]) -> tuple[SupportRow, ...]:
        found = []
        for number, support in zip(range(start, stop), chain(supports, repeat(_EMPTY_SUPPORT)), strict=False):
            size, outside_mass, outside_token_id, outside_prob = records[number]
            if size != len(support):
                raise ProtocolError(f"a support row of {size} ids came for a support of {len(support)}")
            own = probs[slice(*spans[number])]
            known = None if statistics is None else statistics[number]
            found.append(SupportRow(support, own, outside_mass, outside_token_id, known, outside_prob))
        return tuple(found)

    return RowBlock(RowKind.SUPPORT, len(records), rows)


def _statistics(
    message: target_pb2.StatisticsColumns, spans: Sequence[tuple[int, int]]
) -> list[RowStatistics]:
    total = spans[-1][1] if spans else 0
    records = records_from_bytes(_STATISTICS, message.records, "the column of statistics", len(spans))
    ranks = ids_from_bytes(message.ranks, "the column of ranks", total)
    logits = floats_from_bytes(message.logits, "the column of logits", total)
    return [
        RowStatistics(entropy, max_prob, argmax, ranks[first:last], logits[first:last])
        for (entropy, max_prob, argmax), (first, last) in zip(records, spans, strict=True)
    ]
