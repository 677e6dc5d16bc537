"""The values of a JSON text are counted correctly, however it is split and whatever its strings contain."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.bodies import JsonShape

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
    shape = JsonShape()
    for start in range(0, len(content), size):
        shape.feed(content[start : start + size])
    shape.feed(b"")
    assert (shape.values, shape.containers) == counted(document)


def test_a_text_with_too_many_values_is_refused() -> None:
    shape = JsonShape()
    shape.feed(b'{"a": [1, 2, 3]}')
    assert list(shape.excesses(2, 3)) == []
    assert list(shape.excesses(1, 2)) == [
        "the body has 2 values or more; it must have at most 1",
        "the body has 3 lists, objects and fields or more; it must have at most 2",
    ]
