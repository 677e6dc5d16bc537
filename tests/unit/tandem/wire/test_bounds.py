"""Repeated fields of a peer's message are counted before they are walked, and large messages before they are parsed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    Cancel,
    Delta,
    DraftOptions,
    Finish,
    RowKind,
    SamplingParams,
    TargetOptions,
    VerifyStep,
)
from tandem.v1 import draft_pb2, target_pb2, types_pb2
from tandem.wire import columns, common, draft, target

MANY = columns.MAX_IDS + 1
"""More than any field may hold."""
REFUSED = (ProtocolError, InvalidRequestError)


def read_tokenizer(message: draft_pb2.MapVocabularyRequest) -> None:
    async def parts() -> AsyncIterator[draft_pb2.MapVocabularyRequest]:
        yield message

    asyncio.run(draft.tokenizer_from_proto(parts()))


READERS: dict[type[Message], Callable[[Any], Any]] = {
    target_pb2.VerifyRequest: lambda message: list(target.requests_from_proto(message)),
    target_pb2.VerifyResponse: lambda message: list(target.answers_from_proto(message)),
    target_pb2.TargetServiceGetModelInfoResponse: lambda it: common.model_info_from_proto(it.model_info),
    draft_pb2.ProposeRequest: lambda message: list(draft.requests_from_proto(message)),
    draft_pb2.ProposeResponse: lambda message: list(draft.answers_from_proto(message)),
    draft_pb2.DraftServiceGetModelInfoResponse: lambda it: common.model_info_from_proto(it.model_info),
    draft_pb2.MapVocabularyRequest: read_tokenizer,
}
"""How each message between coordinators and services is read. Those of clients are bounded by their bytes."""


def repeated(descriptor: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to each field of a message, however deep, that may hold any number of values."""
    for field in descriptor.fields:
        own = (*path, field.name)
        if field.is_repeated:
            yield own
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from repeated(field.message_type, own)


def filled(kind: type[Message], path: tuple[str, ...]) -> Message:
    """A message with many values in one of its fields, and one in each on the way there."""
    message = part = kind()
    for name in path[:-1]:
        inner = getattr(part, name)
        part = inner.add() if part.DESCRIPTOR.fields_by_name[name].is_repeated else inner
    field, values = part.DESCRIPTOR.fields_by_name[path[-1]], getattr(part, path[-1])
    if field.message_type is None:
        values.extend([1] * MANY)
    elif field.message_type.GetOptions().map_entry:
        values.update(dict.fromkeys(range(MANY), 1.0))
    else:
        for _ in range(MANY):
            values.add()
    return message


FIELDS = [(kind, path) for kind in READERS for path in repeated(kind.DESCRIPTOR)]


@pytest.mark.parametrize(
    ("kind", "path"), FIELDS, ids=[f"{kind.__name__}.{'.'.join(path)}" for kind, path in FIELDS]
)
def test_a_field_that_repeats_is_counted_before_it_is_walked(
    kind: type[Message], path: tuple[str, ...]
) -> None:
    message = filled(kind, path)
    with pytest.raises(REFUSED, match=r"may hold at most|dimensions"):
        READERS[kind](message)


def test_every_repeated_field_is_found() -> None:
    found = {path for _, path in FIELDS}
    assert {("opens",), ("verifications",), ("ends",), ("model_info", "step_profile", "steps")} <= found
    assert ("opens", "logit_adjustments", "biases") in found
    assert ("verifications", "dense_rows", "shape") in found


def rows_of(count: int, **fields: Any) -> target_pb2.VerifyResponse:
    record = struct.pack("<3if2i", 1, 4, count, 0.0, 0, 0)
    return target_pb2.VerifyResponse(verifications=[target_pb2.VerificationColumns(records=record, **fields)])


ROWS = columns.MAX_ROWS + 1
COLUMNS: dict[str, Message] = {
    "verifications": target_pb2.VerifyResponse(
        verifications=[target_pb2.VerificationColumns(records=bytes(24 * 2000)) for _ in range(2)]
    ),
    "token rows": rows_of(ROWS, token_rows=target_pb2.TokenRows(token_ids=bytes(4 * ROWS))),
    "support rows": rows_of(ROWS, support_rows=target_pb2.SupportRows(records=bytes(16 * ROWS))),
    "dense rows": rows_of(
        ROWS,
        dense_rows=types_pb2.Tensor(
            data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[ROWS, 1], data=bytes(4 * ROWS)
        ),
    ),
    "proposals": draft_pb2.ProposeResponse(
        proposals=[draft_pb2.ProposalColumns(records=bytes(24 * 2000)) for _ in range(2)]
    ),
    "proposed tokens": draft_pb2.ProposeResponse(
        proposals=[draft_pb2.ProposalColumns(token_ids=bytes(4 * ROWS))]
    ),
    "ids of distributions": draft_pb2.ProposeResponse(
        proposals=[
            draft_pb2.ProposalColumns(
                records=struct.pack("<3if2i", 1, 4, 1, 0.0, 0, 0),
                token_ids=bytes(4),
                distributions=draft_pb2.DistributionColumns(
                    support_sizes=struct.pack("<i", columns.MAX_SUPPORT_IDS + 1),
                    support_ids=bytes(4 * (columns.MAX_SUPPORT_IDS + 1)),
                    probabilities=bytes(4 * (columns.MAX_SUPPORT_IDS + 1)),
                ),
            )
        ]
    ),
    "outcomes": draft_pb2.ProposeResponse(
        outcomes=[
            draft_pb2.OutcomeColumns(records=bytes(24 * 2000), depths=bytes(12 * 2000)) for _ in range(2)
        ]
    ),
    "steps of a target": target_pb2.VerifyRequest(
        steps=target_pb2.VerifySteps(records=bytes(40 * (columns.MAX_PARTS + 1)))
    ),
    "steps of a draft": draft_pb2.ProposeRequest(
        steps=draft_pb2.ProposeSteps(records=bytes(28 * (columns.MAX_PARTS + 1)))
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_values_of_a_column_are_counted_before_they_are_walked(name: str) -> None:
    message = COLUMNS[name]
    with pytest.raises(ProtocolError, match="may hold at most"):
        READERS[type(message)](message)


def test_rows_of_a_block_are_as_many_as_its_records_say() -> None:
    """However many the other column holds, it is not walked."""
    block = target_pb2.TokenRows(token_ids=bytes(4 * ROWS))
    with pytest.raises(ProtocolError, match="must hold 4 for 1 values"):
        list(target.answers_from_proto(rows_of(1, token_rows=block)))


SAMPLING = SamplingParams(temperature=0.0)
PARTS: list[tuple[Callable[[Iterable[tuple[int, Any]]], Message], Any]] = [
    (target.requests_to_proto, TargetOptions("", SAMPLING)),
    (target.requests_to_proto, VerifyStep(Delta(0, []), RowKind.TOKEN, 0)),
    (target.requests_to_proto, Cancel()),
    (draft.requests_to_proto, DraftOptions("", SAMPLING)),
    (draft.requests_to_proto, Finish(0)),
]


@pytest.mark.parametrize(("write", "part"), PARTS)
def test_no_message_of_ours_is_beyond_the_bounds(
    write: Callable[[Iterable[tuple[int, Any]]], Message], part: Any
) -> None:
    outbox: columns.Outbox[Any] = columns.Outbox()
    for number in range(3 * columns.MAX_PARTS):
        outbox.put(number, part)
    message = write(outbox.take())
    columns.check_fields(message.SerializeToString())
    assert len(READERS[type(message)](message)) == columns.MAX_PARTS


def test_a_large_message_of_many_fields_is_refused_unparsed() -> None:
    many = target_pb2.VerifyResponse(ends=[types_pb2.SequenceEnd() for _ in range(MANY)]).SerializeToString()
    with pytest.raises(ProtocolError, match="holds more than 2048 parts"):
        columns.check_fields(many)
    tensor = types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[1, MANY], data=bytes(4 * MANY))
    columns.check_fields(rows_of(1, dense_rows=tensor).SerializeToString())


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_left_to_the_parser(content: bytes) -> None:
    padding = b"\x0a" + b"\x80\x80\x04" + bytes(1 << 16)
    columns.check_fields(content)
    columns.check_fields(content[:8] + padding)
    columns.check_fields(padding + content)
