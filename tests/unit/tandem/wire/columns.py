"""Values, comparisons and corruptions for tests of messages in columns."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st

from tandem.types import StepCost

FLOATS = st.floats(0.0, 1.0, width=32)
IDS = st.integers(0, 2**31 - 1)
COSTS = st.one_of(
    st.none(),
    st.builds(StepCost, st.floats(2**-12, 100.0, width=32), st.integers(1, 8), st.integers(8, 99)),
)
_CONTENTS = st.one_of(
    st.binary(max_size=64),
    st.lists(st.integers(-2, 3), max_size=16).map(lambda values: np.array(values, "<i4").tobytes()),
)

MessageT = TypeVar("MessageT", bound=Message)


def plain(value: object) -> object:
    """Arrays as types and bytes, so that equal means equal bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def corrupted(data: st.DataObject, message: MessageT) -> MessageT:
    """Replace one of the message's columns, in whichever of its parts."""
    owner, name = data.draw(st.sampled_from(_columns(message)))
    setattr(owner, name, data.draw(_CONTENTS))
    return message


def _columns(message: Message) -> list[tuple[Message, str]]:
    found: list[tuple[Message, str]] = []
    for field, value in message.ListFields():
        if isinstance(value, bytes):
            found.append((message, field.name))
        elif field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                found += _columns(part)
    return found
