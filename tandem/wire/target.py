"""TargetService: verifications and what asks for them, for many sequences in a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    MAX_LEAD,
    MAX_LOGIT_BIAS,
    Cancel,
    Delta,
    DenseRow,
    DraftedOutcomes,
    Finish,
    FloatArray,
    IntArray,
    LogitAdjustments,
    Pending,
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
from tandem.wire import columns, common
from tandem.wire.draft import outcomes_from_proto, outcomes_to_proto
from tandem.wire.mirror import Mirror
from tandem.wire.status import Ending, ending_from_proto, ending_to_proto

Request: TypeAlias = TargetOptions | VerifyStep | DraftedOutcomes | Finish | Cancel
"""A coordinator's message part for one sequence."""

_STEP = Struct("<10i")
"""Sequence, base length, number of token ids, row kind, row count, 1 with statistics, lead, fewest proposed tokens,
1 for alone after a miss, serial."""
_PENDING = Struct("<3i")
"""Sequence, serial, 1 for a step that waits for room."""
_LABEL = Struct("<2i")
"""Serial of the step that was asked, and the number of steps behind it."""
_SUPPORT_ROW = Struct("<ifif")
"""Ids of the support, mass outside, the sample from outside, its probability."""
_STATISTICS = Struct("<ffi")
"""Entropy, maximum probability, argmax."""
_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_HAS_SUPPORTS = common.row_kind_to_proto(RowKind.SUPPORT)

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
    supports: list[IntArray] = []
    for step in common.write_requests(message, requests, _OPTIONS, VerifyStep, _STEP, _numbers):
        if step.row_kind is RowKind.SUPPORT:
            supports += step.supports
            supports += [_EMPTY_SUPPORT] * (step.row_count - len(step.supports))
    if supports:
        message.steps.support_sizes = columns.pack_ints([len(support) for support in supports])
        message.steps.support_ids = columns.pack_ids(supports)
    return message


def _numbers(step: VerifyStep) -> tuple[int, ...]:
    kind = common.row_kind_to_proto(step.row_kind)
    flags = step.with_statistics, step.lead, step.min_proposed, step.alone_after_miss
    return kind, step.row_count, *flags, step.serial


def requests_from_proto(
    message: target_pb2.VerifyRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """The requests of a message; see `read_requests`."""
    records = columns.unpack_records(_STEP, message.steps.records, "steps")
    supports = iter(_supports_from_proto(message.steps, records))

    def step(
        delta: Delta,
        kind: int,
        rows: int,
        statistics: int,
        lead: int,
        min_proposed: int,
        alone: int,
        serial: int,
    ) -> VerifyStep:
        own = tuple(islice(supports, max(rows, 0))) if kind == _HAS_SUPPORTS else ()
        if rows < 0:
            raise InvalidRequestError(f"row_count is {rows}; it must be at least 0")
        if not 0 <= lead <= MAX_LEAD:
            raise InvalidRequestError(f"lead is {lead}; it must be from 0 to {MAX_LEAD}")
        row_kind = common.row_kind_from_proto(kind)
        return VerifyStep(
            delta, row_kind, rows, own, bool(statistics), lead, min_proposed, bool(alone), serial
        )

    columns.check_count(len(message.opens), "opens")
    columns.check_count(sum(map(_listed_ids, message.opens)), "ids of biases and ends", columns.MAX_IDS)
    yield from common.read_requests(message, _options_from_proto, records, step)
    if message.HasField("outcomes"):
        for sequence, drafted in outcomes_from_proto(message.outcomes):
            yield sequence, _check_outcomes(drafted)


def _listed_ids(message: target_pb2.VerifyOpen) -> int:
    wanted = message.logit_adjustments
    return len(message.end_token_ids) + len(wanted.biases) + len(wanted.suppressed_token_ids)


def _check_outcomes(drafted: DraftedOutcomes) -> DraftedOutcomes | InvalidRequestError:
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


def _supports_from_proto(message: target_pb2.VerifySteps, records: Sequence[Any]) -> list[IntArray]:
    count = sum([max(record[4], 0) for record in records if record[3] == _HAS_SUPPORTS])
    if not count:
        return []
    columns.check_count(count, "rows", columns.MAX_ROWS)
    sizes = columns.unpack_ints(message.support_sizes, "support sizes")
    if len(sizes) != count:
        raise ProtocolError(f"{len(sizes)} supports came for {count} rows")
    ids = columns.unpack_ids(message.support_ids, "support ids")
    return [ids[start:stop] for start, stop in columns.bounds(sizes, len(ids), "support ids")]


# ---- verifications


def answers_to_proto(
    answers: Iterable[tuple[int, Verification | Pending | Ending]],
) -> target_pb2.VerifyResponse:
    """A message of answers to sequences by number; those of one form become one block."""
    message = target_pb2.VerifyResponse()
    forms: dict[tuple[type[TargetRow], bool], list[tuple[int, Verification]]] = {}
    pending: list[bytes] = []
    for sequence, answer in answers:
        if isinstance(answer, Ending):
            message.ends.append(ending_to_proto(sequence, answer))
        elif isinstance(answer, Pending):
            pending.append(_PENDING.pack(sequence, answer.serial, answer.is_waiting))
        else:
            forms.setdefault(_form(answer.rows), []).append((sequence, answer))
    if pending:
        message.pending_records = b"".join(pending)
    for (kind, _), block in forms.items():
        answered = message.verifications.add()
        answered.records = columns.pack_answers((number, each, len(each.rows)) for number, each in block)
        answered.labels = columns.pack_ints([part for _, each in block for part in (each.serial, each.led)])
        led = [each.led_token_id for _, each in block]
        if max(led) >= 0:
            answered.led_token_ids = columns.pack_ints(led)
        proposed = [each.next_proposed for _, each in block]
        if max(proposed) >= 0:
            answered.next_proposed_counts = columns.pack_ints(proposed)
        rows: list[Any] = [row for _, each in block for row in each.rows]
        if kind is TokenRow:
            answered.token_rows.token_ids = columns.pack_ints([row.token_id for row in rows])
        elif kind is DenseRow:
            answered.dense_rows.CopyFrom(common.logits_to_tensor(np.stack([row.logits for row in rows])))
        else:
            _supports_to_proto(answered.support_rows, rows)
    return message


def _form(rows: Sequence[TargetRow]) -> tuple[type[TargetRow], bool]:
    if not rows:
        return TokenRow, False
    return type(rows[0]), getattr(rows[0], "statistics", None) is not None


def _supports_to_proto(message: target_pb2.SupportRows, rows: Sequence[SupportRow]) -> None:
    message.records = b"".join(
        [
            _SUPPORT_ROW.pack(len(row.probs), row.outside_mass, row.outside_token_id, row.outside_prob or 0.0)
            for row in rows
        ]
    )
    message.probabilities = columns.pack_floats(np.concatenate([row.probs for row in rows]))
    if statistics := [row.statistics for row in rows if row.statistics is not None]:
        message.statistics.records = b"".join(
            [_STATISTICS.pack(each.entropy, each.max_prob, each.argmax_token_id) for each in statistics]
        )
        message.statistics.ranks = columns.pack_ids([each.ranks for each in statistics])
        message.statistics.logits = columns.pack_floats(np.concatenate([each.logits for each in statistics]))


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of one kind in a message, those of all its sequences."""

    kind: RowKind
    rows: Sequence[Any]
    """Token rows, dense rows, or of support rows the fields behind the support, which the step knows."""


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
    serial: int = 0
    led: int = 0

    def verification(self, step: VerifyStep) -> Verification:
        kind, rows = self.block.kind, tuple(self.block.rows[self.start : self.stop])
        if len(rows) != step.row_count:
            raise ProtocolError(f"{len(rows)} rows came for {step.row_count} that were requested")
        if kind is not step.row_kind and rows:
            raise ProtocolError(f"{kind.value}_rows came where {step.row_kind.value} rows were requested")
        if kind is RowKind.SUPPORT:
            supports = chain(step.supports, repeat(_EMPTY_SUPPORT))
            rows = tuple(
                [_support_row(support, *fields) for fields, support in zip(rows, supports, strict=False)]
            )
        label = self.serial, self.led
        return Verification(self.base_length, rows, self.cost, self.led_token_id, self.next_proposed, *label)


def _support_row(support: IntArray, probs: FloatArray, *others: Any) -> SupportRow:
    if len(probs) != len(support):
        raise ProtocolError(f"a support row of {len(probs)} ids came for a support of {len(support)}")
    return SupportRow(support, probs, *others)


def answers_from_proto(
    message: target_pb2.VerifyResponse,
) -> Iterator[tuple[int, Answer | Pending | Ending]]:
    """The answers of a message, by number of the sequence."""
    columns.check_count(len(message.verifications) + len(message.ends), "blocks and ends")
    columns.check_count(
        sum([columns.answer_count(each.records) for each in message.verifications]), "verifications"
    )
    row_count = 0
    for answered in message.verifications:
        records = list(columns.unpack_answers(answered.records))
        own_rows = sum([count for _, _, count, _ in records])
        row_count += max(own_rows, 0)
        columns.check_count(row_count, "rows", columns.MAX_ROWS)
        block = _read_rows(answered, own_rows)
        led = _optional(answered.led_token_ids, "led tokens", len(records))
        proposed = _optional(answered.next_proposed_counts, "next proposed counts", len(records))
        spans = columns.bounds([count for _, _, count, _ in records], len(block.rows), "rows")
        labels = columns.unpack_records(_LABEL, answered.labels, "labels", len(records))
        for (sequence, base_length, _, cost), span, token_id, count, label in zip(
            records, spans, led, proposed, labels, strict=True
        ):
            yield sequence, Answer(base_length, cost, block, *span, token_id, count, *label)
    for sequence, serial, is_waiting in columns.unpack_records(
        _PENDING, message.pending_records, "pending steps"
    ):
        yield sequence, Pending(serial, bool(is_waiting))
    for end in message.ends:
        yield end.sequence, ending_from_proto(end)


def _optional(column: bytes, what: str, count: int) -> tuple[int, ...]:
    """A column with a value for each record; -1 for each where it is empty."""
    return columns.unpack_ints(column, what, count) if column else (-1,) * count


def _read_rows(message: target_pb2.VerificationColumns, count: int) -> RowBlock:
    """The rows of a block, so many by its records."""
    match message.WhichOneof("rows"):
        case "support_rows":
            return RowBlock(RowKind.SUPPORT, _support_rows(message.support_rows, count))
        case "dense_rows":
            logits = common.logits_from_tensor(message.dense_rows, "dense_rows")
            if len(logits) != count:
                raise ProtocolError(f"{len(logits)} dense rows came for {count} in the records")
            return RowBlock(RowKind.DENSE, [*map(DenseRow, logits)])
        case _:
            ids = columns.unpack_ints(message.token_rows.token_ids, "token rows", count)
            return RowBlock(RowKind.TOKEN, [*map(TokenRow, ids)])


def _support_rows(message: target_pb2.SupportRows, count: int) -> list[tuple[Any, ...]]:
    records = columns.unpack_records(_SUPPORT_ROW, message.records, "support rows", count)
    probs = columns.unpack_floats(message.probabilities, "probabilities").astype(float)
    spans = columns.bounds([record[0] for record in records], len(probs), "probabilities")
    statistics = (
        _statistics(message.statistics, spans) if message.HasField("statistics") else [None] * len(spans)
    )
    return [
        (probs[start:stop], outside_mass, outside_token_id, known, outside_prob)
        for (_, outside_mass, outside_token_id, outside_prob), (start, stop), known in zip(
            records, spans, statistics, strict=True
        )
    ]


def _statistics(
    message: target_pb2.StatisticsColumns, spans: Sequence[tuple[int, int]]
) -> list[RowStatistics]:
    total = spans[-1][1] if spans else 0
    records = columns.unpack_records(_STATISTICS, message.records, "statistics", len(spans))
    ranks = columns.unpack_ids(message.ranks, "ranks", total)
    logits = columns.unpack_floats(message.logits, "logits", total)
    return [
        RowStatistics(entropy, max_prob, argmax, ranks[first:last], logits[first:last])
        for (entropy, max_prob, argmax), (first, last) in zip(records, spans, strict=True)
    ]
