"""Values of arguments become JSON of the types that the tool's schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_coordinator.parsers.values import ALL_TYPES, json_of, python_as_json, types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 2, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/days~1"}]}, {"string", "integer"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "https://a.example/schema"}, ALL_TYPES),
        ({"$ref": "#/no/such"}, ALL_TYPES),
        ({"type": "str"}, ALL_TYPES),
        ({"type": [{}]}, ALL_TYPES),
        ({"anyOf": 1}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    definitions = {"days/": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    assert types_of({"properties": {"a": schema}, "$defs": definitions}, "a") == types


@pytest.mark.parametrize(
    "parameters", [None, [], {"properties": []}, {"properties": {"b": {"type": "string"}}}]
)
def test_without_a_schema_all_types_are_allowed(parameters: Any) -> None:
    assert types_of(parameters, "a") == ALL_TYPES


def test_a_schema_that_branches_into_itself_is_looked_through_once() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/node"}] * 100}
    assert types_of({"properties": {"a": node}, "$defs": {"node": node}}, "a") == ALL_TYPES


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        (" 3 ", {"integer"}, "3"),
        ("3", {"string", "null"}, '"3"'),
        ("null", {"string", "null"}, "null"),
        ("3.0", {"integer"}, "3.0"),
        ("3.5", {"integer"}, '"3.5"'),
        ("3", {"number"}, "3"),
        ("True", {"boolean"}, "true"),
        ("{'a': (1, None)}", {"object"}, '{"a": [1, null]}'),
        ('{"a":1}', {"object"}, '{"a":1}'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("NaN", ALL_TYPES, '"NaN"'),
        ("Infinity", ALL_TYPES, '"Infinity"'),
        ("1e999", {"string"}, '"1e999"'),
        ("say \"it\"\n", {"integer"}, '"say \\"it\\"\\n"'),
        ("Oslo", ALL_TYPES, '"Oslo"'),
        ("[" * 100_000, ALL_TYPES, json.dumps("[" * 100_000)),
        ("9" * 5_000, {"integer"}, f'"{"9" * 5_000}"'),
    ],
)  # fmt: skip
def test_text_as_json(text: str, types: Any, written: str) -> None:
    assert json_of(text, frozenset(types)) == written


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(LITERALS)
def test_python_is_read_as_python_writes_it(value: Any) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        written = python_as_json(text)
        assert written is not None
        assert json.loads(written) == value


@pytest.mark.parametrize(
    "text",
    ["", "some", "f(1)", "{1: 2}", "{1, 2}", "'a", "1 2", "[1", "[1,,]", "1,", "-inf", "b'a'", "[" * 100_000],
)  # fmt: skip
def test_what_is_no_literal_of_json_is_none(text: str) -> None:
    assert python_as_json(text) is None


@given(st.text(), st.sets(st.sampled_from(sorted(ALL_TYPES))))
def test_any_text_becomes_json(text: str, types: set[str]) -> None:
    value = json.loads(json_of(text, frozenset(types)))
    assert value is None or isinstance(value, str | int | float | bool | list | dict)
