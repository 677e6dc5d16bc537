"""Messages that nobody should send: arbitrary bytes, damaged messages, and well-formed ones that make no sense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_INT32 = st.sampled_from([0, 1, -1, 2, 5, 64, 2047, 2048, 2**31 - 1, -(2**31)])
_INT64 = st.one_of(_INT32, st.sampled_from([2**63 - 1, -(2**63)]))
_DOUBLE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e308, 5e-324]), st.floats()
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
    FieldDescriptor.TYPE_FLOAT: _DOUBLE,
    FieldDescriptor.TYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=12),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 77, -1]),
}
_MAX_REPEATED = 6


@st.composite
def changed(draw: st.DrawFn, valid: Message) -> Message:
    """The message with some of its fields, however deep, set to something else."""
    message = type(valid)()
    message.CopyFrom(valid)
    fields = [field for field in message.DESCRIPTOR.fields if _is_worth_it(message, field)]
    for field in draw(st.lists(st.sampled_from(fields), max_size=3)) if fields else ():
        _set(draw, message, field)
    return message


def _is_worth_it(message: Message, field: Any) -> bool:
    """All fields, but of a choice mostly the part that was chosen."""
    chosen = field.containing_oneof and message.WhichOneof(field.containing_oneof.name)
    return not chosen or chosen == field.name


def _set(draw: st.DrawFn, message: Any, field: Any) -> None:
    if field.is_repeated:
        message.ClearField(field.name)
        values = getattr(message, field.name)
        for _ in range(draw(st.integers(0, _MAX_REPEATED))):
            if field.message_type is None:
                values.append(draw(_SCALARS[field.type]))
            elif field.message_type.GetOptions().map_entry:
                entry = _arbitrary(draw, field.message_type)
                values[entry.key] = entry.value
            else:
                values.add().CopyFrom(_arbitrary(draw, field.message_type))
    elif field.message_type is None:
        setattr(message, field.name, draw(_SCALARS[field.type]))
    elif draw(st.integers(0, 4)) == 0:
        message.ClearField(field.name)
    else:
        part = getattr(message, field.name)
        part.CopyFrom(draw(changed(part)))


def _arbitrary(draw: st.DrawFn, descriptor: Any) -> Any:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            _set(draw, message, field)
    return message


@st.composite
def damaged(draw: st.DrawFn, valid: Message) -> bytes:
    """The message's bytes with some of them changed, left out or added."""
    content = bytearray(valid.SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 3)):
            case 0:
                del content[place:]
            case 1:
                content[place:place] = draw(st.binary(max_size=8))
            case _ if place < len(content):
                content[place] ^= draw(st.integers(1, 255))
            case _:
                pass
    return bytes(content)


def contents(valid: Message) -> st.SearchStrategy[bytes]:
    """Generate replacements of a valid message."""
    return st.one_of(
        st.binary(max_size=64),
        damaged(valid),
        changed(valid).map(lambda message: message.SerializeToString()),
    )


@st.composite
def streams(draw: st.DrawFn, valid: Sequence[Message]) -> list[bytes]:
    """Streams that may come in place of a valid one: other messages, another order, some twice, some missing."""
    order = draw(
        st.one_of(
            st.just(list(range(len(valid)))),
            st.lists(st.integers(0, len(valid) - 1), max_size=len(valid) + 2),
        )
    )
    return [
        valid[index].SerializeToString() if draw(st.integers(0, 2)) == 0 else draw(contents(valid[index]))
        for index in order
    ]
