"""Unknown fields are refused by name, or ignored, logged once and reported."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from coordinator.http.bodies import UnknownFields, ignored_header
from coordinator.http.schema import CompletionBody

BODY = b'{"prompt": "x", "foo": 1, "stream": true, "stream_options": {"bar": 2}}'


def test_unknown_fields_are_refused_by_default() -> None:
    with pytest.raises(ValidationError, match="foo"):
        UnknownFields().read(CompletionBody, BODY)


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields("ignore")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            body, names = fields.read(CompletionBody, BODY)
            assert (body.prompt, body.stream_options is not None) == ("x", True)
            assert sorted(names) == ["foo", "stream_options.bar"]
    assert len(caplog.records) == 2


def test_invalid_known_fields_are_still_refused() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        UnknownFields("ignore").read(CompletionBody, b'{"prompt": "x", "foo": 1, "max_tokens": "5"}')


def test_a_name_cannot_add_a_header() -> None:
    assert ignored_header(("a\r\nSet-Cookie: b",), ("tools",)) == {
        "X-Tandem-Ignored": "a??Set-Cookie??b, tools"
    }
    assert ignored_header(()) == {}
