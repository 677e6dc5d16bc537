"""A line of the log is one event, whatever a peer has said."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry.logs import LogFormat, formatter_of

FORGED = (
    "gone\n2026-01-01T00:00:00.000+00:00 error   coordinator: forged \x1b[31m\x9b2J\x7f\x85\u2028\u202e\ud800"
)


def line_of(log_format: LogFormat, words: str, *, raised: bool = False) -> str:
    """The line of an event whose message, field and perhaps exception have these words."""
    exc_info = None
    if raised:
        try:
            raise ValueError(words)
        except ValueError:
            exc_info = sys.exc_info()
    record = logging.LogRecord("peer", logging.WARNING, __file__, 1, "it said %s", (words,), exc_info)
    record.reason = words
    return formatter_of(log_format).format(record)


def is_printable(text: str) -> bool:
    # Cc: controls; Zl and Zp: separators; Cs: halves of surrogate pairs
    return not any(unicodedata.category(each) in ("Cc", "Zl", "Zp", "Cs") for each in text)


@pytest.mark.parametrize("log_format", ["text", "json"])
@given(words=st.text(st.characters()) | st.just(FORGED))
def test_an_event_is_a_printable_line(log_format: LogFormat, words: str) -> None:
    line = line_of(log_format, words)
    assert is_printable(line)
    if log_format == "json":
        assert json.loads(line)["reason"] == words


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exceptions_words_cannot_pass_for_an_event(log_format: LogFormat) -> None:
    first, *others = line_of(log_format, FORGED, raised=True).split("\n")
    assert is_printable(first)
    assert all(is_printable(each) and each.startswith("  ") for each in others)
    assert bool(others) is (log_format == "text")
