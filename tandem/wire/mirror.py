"""One converter for all dataclasses whose messages hold the same fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tandem.errors import InvalidRequestError

DataT = TypeVar("DataT")
MessageT = TypeVar("MessageT", bound=Message)


class Codec(NamedTuple):
    """Conversions of a field's value."""

    encode: Callable[[Any], Any]
    """Converts the dataclass's value to the message's."""
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


class Mirror(Generic[DataT, MessageT]):
    """Converts between a dataclass and a message that holds the same fields.

    Enums travel by name, times as timestamps (and come back in the local zone), fields of any type (`object`) as JSON,
    and dataclasses by their own mirrors, which have to be made before. None leaves a field of the message unset.
    """

    def __init__(
        self, data: type[DataT], message: type[MessageT], *, apart: Collection[str] = (), **sent_as: str
    ) -> None:
        """A mirror of two classes.

        Args:
            apart: Fields of the dataclass that the caller converts.
            sent_as: Names in the message that are neither the dataclass's own nor those of its count: `hit_count` for
                `hits`, or `drafted_token_count` for `drafted`.
        """
        self._data = data
        self._message = message
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
            codec, knows_presence = _codec(hint, described), described.has_presence
            self._fields.append(_Field(each.name, described.name, *codec, may_be_none, knows_presence))
        _MIRRORS[data] = Codec(self._values, self.from_proto)

    def to_proto(self, value: DataT) -> MessageT:
        return self._message(**self._values(value))

    def _values(self, value: DataT) -> dict[str, Any]:
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
        return self._data(**values)


def _timestamp(time: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(time)
    return message


_MIRRORS: dict[Any, Codec] = {
    datetime: Codec(_timestamp, lambda message: message.ToDatetime(UTC).astimezone()),
    object: Codec(json.dumps, json.loads),
}


def travels_by(data: type[DataT], encode: Callable[[DataT], Any], decode: Callable[[Any], DataT]) -> None:
    """Let fields of a type travel by two functions of its own."""
    _MIRRORS[data] = Codec(encode, decode)


def enum_codec(kind: type[Enum], described: EnumDescriptor, field: str) -> Codec:
    """The codec of an enum whose members have the names of the protocol's, without its prefix."""
    prefix = described.values[0].name.removesuffix("UNSPECIFIED")
    values = {member: described.values_by_name[prefix + member.name].number for member in kind}
    members = {value: member for member, value in values.items()}

    def decode(value: int) -> Enum:
        if value not in members:
            names = ", ".join(prefix + member.name for member in kind)
            raise InvalidRequestError(f"{field} is {value}; it must be one of {names}")
        return members[value]

    return Codec(values.__getitem__, decode)


def _codec(hint: Any, described: Any) -> Codec:
    origin = get_origin(hint)
    if origin in (tuple, list):
        item = _codec(get_args(hint)[0], described)
        if item.encode is _itself:
            return Codec(_itself, origin)
        return Codec(
            lambda values: list(map(item.encode, values)), lambda values: origin(map(item.decode, values))
        )
    if origin is Mapping:
        entry = _codec(get_args(hint)[1], described.message_type.fields_by_name["value"])
        return Codec(
            lambda values: {key: entry.encode(value) for key, value in values.items()},
            lambda values: {key: entry.decode(value) for key, value in sorted(values.items())},
        )
    if hint in _MIRRORS:
        return _MIRRORS[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return enum_codec(hint, described.enum_type, described.name)
    assert not is_dataclass(hint), f"{hint} has no mirror yet"
    return Codec(_itself, _itself)


def _itself(value: Any) -> Any:
    return value
