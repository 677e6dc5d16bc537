"""Hidden states on their way from a target to a drafting head on another device.

The coordinator between them passes the message on, and never reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import InvalidRequestError
from tandem.model.types import HiddenStates
from tandem.v1 import types_pb2

_DATA_TYPES = {
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "float16": types_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
}
_NAMES = {number: name for name, number in _DATA_TYPES.items()}


@dataclass(frozen=True, slots=True)
class PassedStates:
    """Hidden states as they came in a target's message, for the draft's."""

    message: types_pb2.HiddenStates
    size: int
    """Bytes of the message."""


def write_states(message: types_pb2.HiddenStates, states: HiddenStates | PassedStates) -> None:
    """Write hidden states, or copy those of another message."""
    if isinstance(states, PassedStates):
        message.CopyFrom(states.message)
        return
    message.head = states.head
    message.first_position = states.first_position
    message.layer_ids.extend(states.layer_ids)
    tensor = message.states
    tensor.data_type = _DATA_TYPES[states.dtype]
    tensor.shape.extend(states.shape)
    tensor.data = states.data


def pass_states(message: types_pb2.HiddenStates) -> PassedStates:
    """Take hidden states as they are."""
    return PassedStates(message, message.ByteSize())


def read_states(message: types_pb2.HiddenStates) -> HiddenStates:
    """The hidden states in a message.

    Raises:
        InvalidRequestError: They are no matrix. The numbers are left to whoever reads them.
    """
    tensor = message.states
    shape = tuple(tensor.shape[:4])
    if len(tensor.shape) != 2 or min(shape) < 1 or message.first_position < 0:
        raise InvalidRequestError(
            f"features have the shape {list(shape)} from position {message.first_position} on; they must be a matrix, "
            "from a position of at least 0 on"
        )
    return HiddenStates(
        head=message.head,
        first_position=message.first_position,
        dtype=_NAMES.get(tensor.data_type, f"data type {tensor.data_type}"),
        shape=(shape[0], shape[1]),
        data=tensor.data,
        layer_ids=tuple(message.layer_ids[:64]),
    )
