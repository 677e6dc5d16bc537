"""One converter for dataclasses whose messages hold the same fields.

For what is not sent in each round: models, statistics, what administrators and clients see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from types import NoneType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tandem.errors import InvalidRequestError

DataT = TypeVar("DataT")
MessageT = TypeVar("MessageT", bound=Message)


class Part(Protocol):
    """Converts values of one type, as fields of other messages."""

    @property
    def data(self) -> Any:
        """The type."""

    @property
    def encode(self) -> Callable[[Any], Any]:
        """Converts the dataclass's value to the message's."""

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Converts the message's value to the dataclass's."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Conversions of a type that is converted by functions of its own."""

    data: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _Field(NamedTuple):
    name: str
    """In the dataclass."""
    sent_as: str
    """In the message."""
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    may_be_none: bool
    knows_presence: bool
    """True if the message can tell whether the field is set."""


class Converter(Generic[DataT, MessageT]):
    """Converts between a dataclass and a message that holds the same fields.

    Enums travel by name, times as timestamps (and come back in the local zone), fields of any type (`object`) as JSON.
    None leaves a field of the message unset.
    """

    def __init__(
        self,
        data: type[DataT],
        message: type[MessageT],
        *parts: Part,
        apart: Collection[str] = (),
        **sent_as: str,
    ) -> None:
        """A converter between two classes.

        Args:
            parts: Converters of the dataclasses among its fields.
            apart: Fields of the dataclass that the caller converts.
            sent_as: Names in the message that are neither the dataclass's own nor those of its count: `hit_count` for
                `hits`, or `drafted_token_count` for `drafted`.
        """
        self.data = data
        self._message = message
        by_type = {part.data: part for part in (*_GENERAL, *parts)}
        known = message.DESCRIPTOR.fields_by_name
        hints = get_type_hints(data)
        self._fields: list[_Field] = []
        for each in fields(data):  # type: ignore[arg-type]
            if each.name in apart:
                continue
            name = sent_as.get(each.name, each.name)
            names = (name, f"{name}_count", f"{name}_token_count", f"{name.removesuffix('s')}_count")
            described = next(known[each] for each in names if each in known)
            hint = hints[each.name]
            may_be_none = NoneType in get_args(hint)
            if may_be_none:
                (hint,) = (part for part in get_args(hint) if part is not NoneType)
            codec = _codec(hint, described, by_type)
            self._fields.append(
                _Field(
                    each.name, described.name, codec.encode, codec.decode, may_be_none, described.has_presence
                )
            )

    def to_proto(self, value: DataT) -> MessageT:
        return self._message(**self.encode(value))

    def encode(self, value: DataT) -> dict[str, Any]:
        """The message's fields by name; a message within another one is made of them, too."""
        values = {}
        for name, sent_as, encode, _, may_be_none, _ in self._fields:
            own = getattr(value, name)
            if own is not None or not may_be_none:
                values[sent_as] = encode(own)
        return values

    def from_proto(self, message: MessageT, **apart: Any) -> DataT:
        """The value in a message, with the fields that the caller converts."""
        values = apart
        for name, sent_as, _, decode, may_be_none, knows_presence in self._fields:
            value = getattr(message, sent_as)
            is_none = may_be_none and not (message.HasField(sent_as) if knows_presence else value)
            values[name] = None if is_none else decode(value)
        return self.data(**values)

    decode = from_proto


def enum_codec(kind: type[Enum], described: EnumDescriptor, field: str) -> Codec:
    """The codec of an enum whose members have the names of the protocol's, without its prefix.

    A member that the protocol does not name is what it means to leave the field unset.
    """
    prefix = described.values[0].name.removesuffix("UNSPECIFIED")
    numbers = {value.name: value.number for value in described.values}
    values = {member: numbers.get(prefix + member.name, 0) for member in kind}
    members = {value: member for member, value in values.items()}

    def decode(value: int) -> Enum:
        if value not in members:
            names = ", ".join(prefix + member.name for member in kind)
            raise InvalidRequestError(f"{field} is {value}; it must be one of {names}")
        return members[value]

    return Codec(kind, values.__getitem__, decode)


def _codec(hint: Any, described: Any, parts: Mapping[Any, Part]) -> Part:
    origin = get_origin(hint)
    if origin in (tuple, list, Sequence):
        made = tuple if origin is tuple else list
        item = _codec(get_args(hint)[0], described, parts)
        if item is _PLAIN:
            return Codec(hint, _itself, made)
        return Codec(
            hint,
            lambda values: [item.encode(each) for each in values],
            lambda values: made(item.decode(each) for each in values),
        )
    if origin is Mapping:
        entry = _codec(get_args(hint)[1], described.message_type.fields_by_name["value"], parts)
        return Codec(
            hint,
            lambda values: {key: entry.encode(value) for key, value in values.items()},
            lambda values: {key: entry.decode(value) for key, value in sorted(values.items())},
        )
    if hint in parts:
        return parts[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return enum_codec(hint, described.enum_type, described.name)
    assert described.message_type is None, f"{hint} is a message, and has no converter"
    return _PLAIN


def _itself(value: Any) -> Any:
    return value


def _timestamp(time: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(time)
    return message


_PLAIN = Codec(None, _itself, _itself)
_GENERAL: tuple[Part, ...] = (
    Codec(datetime, _timestamp, lambda message: message.ToDatetime(UTC).astimezone()),
    Codec(object, json.dumps, json.loads),
)
