"""Values of arguments that a model writes as plain text or as Python, as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
"""The types of JSON schema."""

_ESCAPES = {character: json.dumps(character)[1:-1] for character in ('"', "\\", *map(chr, range(0x20)))}


def escape_text(text: str) -> str:
    """A text as it stands inside a string of JSON."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def quote(text: str) -> str:
    """A text as a string of JSON."""
    return f'"{escape_text(text)}"'


# ---- types by a tool's schema


def types_of(parameters: object, name: str) -> frozenset[str]:
    """The types that a tool's parameters allow for one of them; all of them where they do not say."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or name not in properties:
        return ALL_TYPES
    found: set[str] = set()
    waiting: list[object] = [properties[name]]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        types = _own_types(schema)
        found |= types
        if not types:
            waiting += _choices(schema, parameters)
    return frozenset(found) or ALL_TYPES


def _own_types(schema: object) -> frozenset[str]:
    """The types that a schema itself names; none where others say."""
    if not isinstance(schema, Mapping):
        return ALL_TYPES
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return ALL_TYPES.intersection(name for name in names if isinstance(name, str)) or ALL_TYPES
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(_type_of, values))
    return frozenset() if {"anyOf", "oneOf", "$ref"} & schema.keys() else ALL_TYPES


def _choices(schema: Any, root: object) -> Iterator[object]:
    """The schemas of which a value has one."""
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            yield from choices
    if isinstance(reference := schema.get("$ref"), str):
        yield _at(root, reference)


def _at(root: object, reference: str) -> object:
    """The schema at a reference such as `#/$defs/city`; None where there is none."""
    place = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place if reference.startswith("#") else None


_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _type_of(value: object) -> str:
    """The type of a value of JSON. A number without a fraction is an integer."""
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else _TYPES[type(value)]


# ---- text to JSON


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as plain text, where its schema allows these types.

    It is JSON, or Python, of one of the types, else a string. What is JSON stays as it is written.
    """
    literal = text.strip()
    for written in (literal, python_as_json(literal)):
        if written is not None and _has_type(written, types):
            return written
    return quote(text)


def _has_type(written: str, types: frozenset[str]) -> bool:
    """True if this is JSON of one of the types. A string is plain text already, unless no text is allowed."""
    try:
        found = _type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return False
    if found == "string":
        return False
    return found in types or (found == "integer" and "number" in types)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_TOKENS = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<mark>[\[\](){},:])|(?P<space>\s+)|(?P<word>[^\s'"\[\](){},:]+)""",
    re.DOTALL,
)
_BRACKETS = {"(": "[", ")": "]"}
_CLOSING = frozenset(")]}")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


def python_as_json(text: str) -> str | None:
    """The JSON of a Python literal; None where the text is none that JSON can express.

    JSON itself is read too, as models mix the two.
    """
    try:
        found = "".join(_json_tokens(text))
        json.loads(found, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found


def _json_tokens(text: str) -> Iterator[str]:
    """The tokens of a Python literal, each as JSON writes it."""
    end = 0
    comma = ""
    while end < len(text):
        token = _TOKENS.match(text, end)
        if token is None:
            raise ValueError("a string has no end")
        end = token.end()
        word = token[0]
        if token.lastgroup == "space":
            comma += word
            continue
        if word not in _CLOSING:
            yield comma  # Python allows one before the end
        comma = ""
        match token.lastgroup:
            case "string":
                yield f'"{unescape(word[1:-1])}"'
            case "mark" if word == ",":
                comma = word
            case "mark":
                yield _BRACKETS.get(word, word)
            case _:
                yield _WORDS.get(word) or number_of(word)
    yield comma


def number_of(word: str) -> str:
    """The JSON of a number that is written in Python; a ValueError where it is none."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word} is no number of JSON")
    return json.dumps(number)


_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.|$)", re.DOTALL)
_SIMPLE_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip


def unescape(body: str) -> str:
    """The inside of a string of Python as that of a string of JSON. An escape that Python does not know stays."""
    written: list[str] = []
    start = 0
    for found in _ESCAPE.finditer(body):
        written.append(escape_text(body[start : found.start()]))
        written.append(_escape(found[0]))
        start = found.end()
    written.append(escape_text(body[start:]))
    return "".join(written)


def _escape(escape: str) -> str:
    """An escape of Python as JSON writes it."""
    kind = escape[1:2]
    if kind in _SIMPLE_ESCAPES:
        return escape_text(_SIMPLE_ESCAPES[kind])
    if kind.isdigit() and kind < "8":
        return escape_text(chr(int(escape[1:], 8)))
    if kind in ("x", "u", "U") and len(escape) > 2:
        code = int(escape[2:], base=16)  # noqa: FURB166 - an escape has no prefix
        # Half of a character outside the basic plane stays an escape, which its other half completes.
        if code < 0x10000:
            return f"\\u{code:04x}" if code < 0x20 or 0xD800 <= code < 0xE000 else escape_text(chr(code))
        if code < 0x110000:
            return chr(code)
    return escape_text(escape)
