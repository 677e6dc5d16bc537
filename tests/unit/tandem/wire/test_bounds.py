"""Repeated fields of a peer's message are counted before they are walked, and large messages before they are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
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
from tandem.rpc.outbox import Outbox
from tandem.v1 import draft_pb2, target_pb2, types_pb2
from tandem.wire import bounds, common, draft, target

MANY = bounds.MAX_IDS + 1
"""More than most fields may hold, and enough for a message to be counted."""
MOST = bounds.MAX_DELTA_IDS + 1
"""More than any field may hold."""
REFUSED = (ProtocolError, InvalidRequestError)


def read_tokenizer(message: draft_pb2.MapVocabularyRequest) -> None:
    async def parts() -> AsyncIterator[draft_pb2.MapVocabularyRequest]:
        yield message

    asyncio.run(draft.tokenizer_from_proto(parts()))


READERS: dict[type[Message], Callable[[Any], Any]] = {
    target_pb2.VerifyRequest: lambda message: list(target.requests_from_proto(message)),
    target_pb2.VerifyResponse: lambda message: list(target.answers_from_proto(message)),
    target_pb2.TargetServiceGetModelInfoResponse: lambda it: (
        common.model_info_from_proto(it.model_info),
        common.statistics_from_proto(it.statistics),
    ),
    draft_pb2.ProposeRequest: lambda message: list(draft.requests_from_proto(message)),
    draft_pb2.ProposeResponse: lambda message: list(draft.answers_from_proto(message)),
    draft_pb2.DraftServiceGetModelInfoResponse: lambda it: (
        common.model_info_from_proto(it.model_info),
        common.statistics_from_proto(it.statistics),
    ),
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
        is_text = field.type == field.TYPE_STRING
        values.extend(["1" if is_text else 1] * MOST)
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
    assert {("parts",), ("model_info", "step_profile", "steps")} <= found
    assert ("parts", "open", "logit_adjustments", "biases") in found
    assert ("parts", "verification", "dense_rows", "shape") in found
    assert ("parts", "outcomes", "continuations", "drawn_from", "token_ids") in found


TOGETHER: dict[str, tuple[type[Message], tuple[str, ...], int]] = {
    "token rows": (target_pb2.VerifyResponse, ("verification", "token_rows", "token_ids"), bounds.MAX_VALUES),
    "support rows": (target_pb2.VerifyResponse, ("verification", "support_rows", "rows"), bounds.MAX_VALUES),
    "proposed tokens": (draft_pb2.ProposeResponse, ("proposal", "token_ids"), bounds.MAX_VALUES),
    "distributions": (draft_pb2.ProposeResponse, ("proposal", "distributions"), bounds.MAX_VALUES),
    "continuations": (draft_pb2.ProposeResponse, ("outcomes", "continuations"), bounds.MAX_VALUES),
    "proposals": (target_pb2.VerifyRequest, ("step", "given", "token_ids"), bounds.MAX_VALUES),
    "supports": (target_pb2.VerifyRequest, ("step", "rows", "supports"), bounds.MAX_VALUES),
    "end ids": (target_pb2.VerifyRequest, ("open", "end_token_ids"), bounds.MAX_IDS),
    "deltas": (target_pb2.VerifyRequest, ("step", "committed", "token_ids"), bounds.MAX_DELTA_IDS),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_the_values_of_all_parts_are_counted_together(name: str) -> None:
    """Many sequences could each hold as much as one."""
    kind, path, limit = TOGETHER[name]
    message: Any = kind()
    for number in (1, 2):
        owner: Any = message.parts.add(sequence=number)
        for part in path[:-1]:
            owner = getattr(owner, part)
        values = getattr(owner, path[-1])
        is_message = owner.DESCRIPTOR.fields_by_name[path[-1]].message_type is not None
        # As many as there may be, and one more with the second part
        for _ in range((limit if number == 1 else 1) if is_message else 0):
            values.add()
        values.extend([] if is_message else [1] * (limit if number == 1 else 1))
    message.MergeFromString(PADDING)
    with pytest.raises(ProtocolError, match=f"may hold at most {limit}"):
        READERS[kind](message)


PADDING = b"\xc2\x3e\x80\x80\x04" + bytes(1 << 16)
"""An unknown field, which makes a message large enough to be counted."""


def test_more_rows_than_were_asked_for_are_not_walked() -> None:
    message = target_pb2.VerifyResponse()
    verification = message.parts.add(sequence=1).verification
    verification.base_length = 4
    for _ in range(3):
        verification.support_rows.rows.add(probabilities=[0.5])
    [(_, answer)] = target.answers_from_proto(message)
    assert isinstance(answer, target.Answer)
    step = VerifyStep(Delta(0, (1, 2, 3, 4, 5)), RowKind.SUPPORT, 2, (np.arange(1), np.arange(1)))
    with pytest.raises(ProtocolError, match="3 rows came for 2 that were requested"):
        answer.verification(step)


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
    outbox: Outbox[Any] = Outbox()
    for number in range(3 * bounds.MAX_PARTS):
        outbox.put(number + 1, part)
    message = write(outbox.take())
    read = bounds.read_message(type(message), message.SerializeToString())
    assert len(READERS[type(message)](read)) == bounds.MAX_PARTS


def part_of_fields(path: tuple[str, ...], described: Any) -> bytes:
    """Bytes of a message with empty fields, too many and however deep, at this way; more than a megabyte."""
    content = b""
    for name in reversed(path):
        *_, field = [field for field in chain_of(path, described) if field.name == name]
        prefix = encoded(field.number << 3 | 2)
        content = prefix + encoded(len(content)) + content if content else (prefix + b"\0") * MANY_FIELDS
    return content


def chain_of(path: tuple[str, ...], described: Any) -> Iterator[Any]:
    """The fields on a way."""
    for name in path:
        field = described.fields_by_name[name]
        described = field.message_type
        yield field


def encoded(value: int) -> bytes:
    """A number in protobuf's form."""
    content = b""
    while value > 127:
        content += bytes([value & 127 | 128])
        value >>= 7
    return content + bytes([value])


MANY_FIELDS = bounds.WALKED_BYTES // 2 + 1
STREAMED = (
    target_pb2.VerifyRequest,
    target_pb2.VerifyResponse,
    draft_pb2.ProposeRequest,
    draft_pb2.ProposeResponse,
)
OF_MESSAGES = [
    (kind, path)
    for kind in STREAMED
    for path in repeated(kind.DESCRIPTOR)
    if list(chain_of(path, kind.DESCRIPTOR))[-1].message_type is not None
]


@pytest.mark.parametrize(
    ("kind", "path"), OF_MESSAGES, ids=[f"{kind.__name__}.{'.'.join(path)}" for kind, path in OF_MESSAGES]
)
def test_a_large_message_of_many_fields_is_refused_unparsed(
    kind: type[Message], path: tuple[str, ...]
) -> None:
    content = part_of_fields(path, kind.DESCRIPTOR)
    kind.FromString(content)  # it is a message
    with pytest.raises(
        ProtocolError, match=f"of {len(content)} bytes holds more than {bounds.MAX_FIELDS} fields"
    ):
        bounds.read_message(kind, content)


def test_fields_behind_unknown_ones_are_counted() -> None:
    many = part_of_fields(("parts",), target_pb2.VerifyResponse.DESCRIPTOR)
    group = encoded(99 << 3 | 3) + encoded(99 << 3 | 4)
    scalars = encoded(100 << 3) + b"\1" + encoded(101 << 3 | 1) + bytes(8) + encoded(102 << 3 | 5) + bytes(4)
    target_pb2.VerifyResponse.FromString(group + scalars)
    with pytest.raises(ProtocolError, match="fields"):
        bounds.read_message(target_pb2.VerifyResponse, group + scalars + many)


def test_fields_before_an_error_are_counted() -> None:
    """The parser would make objects of them before it came to the error."""
    many = part_of_fields(
        ("parts", "verification", "support_rows", "rows"), target_pb2.VerifyResponse.DESCRIPTOR
    )
    for error in (b"\0", b"\7", b"\x0a\x7f"):
        with pytest.raises(ProtocolError, match="fields"):
            bounds.read_message(target_pb2.VerifyResponse, many + error)


def test_a_large_message_of_numbers_is_read() -> None:
    tensor = types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[1, MANY_FIELDS])
    tensor.data = b"\x0a\0" * 2 * MANY_FIELDS
    whole = target_pb2.VerifyResponse()
    whole.parts.add(sequence=1).verification.dense_rows.CopyFrom(tensor)
    assert bounds.read_message(target_pb2.VerifyResponse, whole.SerializeToString()) == whole
    prompt = target_pb2.VerifyRequest()
    prompt.parts.add(sequence=1).step.committed.token_ids.extend([5] * bounds.MAX_DELTA_IDS)
    assert bounds.read_message(target_pb2.VerifyRequest, prompt.SerializeToString()) == prompt


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_left_to_the_parser(content: bytes) -> None:
    described = target_pb2.VerifyResponse.DESCRIPTOR
    padding = b"\xc2\x3e\x80\x80\x40" + bytes(bounds.WALKED_BYTES)
    bounds.check_bytes(content, described)
    bounds.check_bytes(content[:8] + padding, described)
    bounds.check_bytes(padding + content, described)
