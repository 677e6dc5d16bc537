"""What is counted before a body is parsed, and what becomes of unknown fields."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.http.bodies import BodyReader, JsonShape, ignored_header
from coordinator.http.schema import CompletionBody, ResponsesBody
from coordinator.settings.coordinator import HttpOptions
from tandem.errors import InvalidRequestError

strings = st.text(st.sampled_from('\\",[]{}: abé\n'))
documents: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | strings,
    lambda inner: st.lists(inner) | st.dictionaries(strings, inner),
    max_leaves=40,
)


def counted(document: Any) -> tuple[int, int]:
    """Count the commas, and the brackets, braces and colons."""
    if not isinstance(document, dict | list):
        return 0, 0
    items = [*document.values()] if isinstance(document, dict) else document
    inner = [counted(item) for item in items]
    colons = len(items) if isinstance(document, dict) else 0
    commas = max(0, len(items) - 1)
    return commas + sum(each for each, _ in inner), 1 + colons + sum(each for _, each in inner)


@given(documents, st.booleans(), st.integers(1, 9))
def test_commas_and_brackets_outside_strings_are_counted(document: Any, ascii_only: bool, size: int) -> None:
    content = json.dumps(document, ensure_ascii=ascii_only).encode()
    shape = JsonShape(0, 0)
    for start in range(0, len(content), size):
        shape.feed(content[start : start + size])
    shape.feed(b"")
    assert (shape.values, shape.containers) == counted(document)


def test_a_text_with_too_many_values_is_refused() -> None:
    for bounds, excesses in (((2, 3), 0), ((1, 2), 2)):
        shape = JsonShape(*bounds)
        shape.feed(b'{"a": [1, 2, 3]}')
        assert len(list(shape.excesses())) == excesses


BODY = b'{"prompt": "x", "foo": 1, "stream": true, "stream_options": {"bar": 2}}'


def test_strict_requests_have_no_unknown_fields() -> None:
    reader = BodyReader(HttpOptions(strict_requests=True))
    with pytest.raises(InvalidRequestError, match=r"^foo is not an option .*; stream_options\.bar is not"):
        reader.parse(CompletionBody, BODY)
    responses = b'{"input": [{"role": "user", "content": "x", "phase": 1}]}'
    with pytest.raises(InvalidRequestError, match=r"input\.0\.phase is not an option"):
        reader.parse(ResponsesBody, responses)
    assert BodyReader(HttpOptions()).parse(ResponsesBody, responses)[1] == ("input.0.phase",)


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(HttpOptions())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            body, names = reader.parse(CompletionBody, BODY)
            assert (body.prompt, body.stream_options is not None) == ("x", True)
            assert sorted(names) == ["foo", "stream_options.bar"]
    assert len(caplog.records) == 2
    with pytest.raises(ValidationError, match="max_tokens"):
        reader.parse(CompletionBody, b'{"prompt": "x", "foo": 1, "max_tokens": "5"}')


def test_a_name_cannot_add_a_header() -> None:
    assert ignored_header(("a\r\nSet-Cookie: b",), ("tools",)) == {
        "X-Tandem-Ignored": "a??Set-Cookie??b, tools"
    }
    assert ignored_header(()) == {}
