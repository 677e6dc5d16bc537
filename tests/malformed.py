"""Messages that no peer should send: those of valid calls with changes, and others of the same types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tandem.model.types import (
    AheadBudget,
    Cancel,
    Delta,
    DraftOptions,
    Finish,
    LogitAdjustments,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetOptions,
    VerifyStep,
)
from tandem.v1 import generation_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire

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


@st.composite
def arbitrary(draw: st.DrawFn, descriptor: Any) -> Message:
    """Any message of a type."""
    message: Message = _arbitrary(draw, descriptor)
    return message


def contents(valid: Message) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.binary(max_size=64),
        arbitrary(valid.DESCRIPTOR).map(lambda message: message.SerializeToString()),
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


GENERATE = generation_pb2.GenerateRequest(text="def f(", max_tokens=3, temperature=0.5, seed=1, stop=["\n\n"])
SAMPLING = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=3)
DELTA, NEXT_DELTA = Delta(0, [1, 2, 3]), Delta(3, [4, 5])
DROP = Cancel()
"""For an unknown sequence; after mutation it may name a known one."""
DRAFTED = DraftOptions("r", SAMPLING, 40, row_kind=RowKind.SUPPORT, draft_top_k=8, ahead=AheadBudget(4, 2))
SUPPORTS = np.array([4, 9]), np.array([5, 8])
PROPOSE = tuple(
    draft_wire.requests_to_proto([request])
    for request in (
        (1, DRAFTED),
        (1, ProposeStep(DELTA, 2)),
        (1, ProposeStep(NEXT_DELTA, 3, AheadBudget(2, 2))),
        (1, Finish(5)),
        (2, DROP),
    )
)
VERIFY = tuple(
    target_wire.requests_to_proto([request])
    for request in (
        (1, TargetOptions("r", SAMPLING, 40, prompt_length=3, adjustments=LogitAdjustments({3: 1.0}))),
        (1, VerifyStep(DELTA, RowKind.TOKEN, 1)),
        (1, VerifyStep(NEXT_DELTA, RowKind.SUPPORT, 3, SUPPORTS, with_statistics=True)),
        (1, Finish(5)),
        (2, DROP),
    )
)


CALLS: dict[str, tuple[str, tuple[Message, ...]]] = {
    "coordinator": ("/tandem.v1.GenerationService/Generate", (GENERATE,)),
    "draft": ("/tandem.v1.DraftService/Propose", PROPOSE),
    "target": ("/tandem.v1.TargetService/Verify", VERIFY),
}
"""The main method of each service, and the messages of a valid call."""
