"""The list of vLLM's tests that do not pass here: how it is read, and that it says each thing once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.peer.listed import FOLDERS, Group, Outcome, find_unused, read_groups


@pytest.mark.parametrize(
    ("entry", "named", "others"),
    [
        ("openai/parser", ["openai/parser/test_a.py", "openai/parser"], ["openai/parsers/test_a.py"]),
        ("openai/test_a.py", ["openai/test_a.py", "openai/test_a.py::test_b[c]"], ["openai/test_ab.py"]),
        ("a.py::test_b", ["a.py::test_b", "a.py::test_b[c]"], ["a.py::test_bc", "a.py"]),
        ("a.py::test_b[c]", ["a.py::test_b[c]"], ["a.py::test_b", "a.py::test_b[d]", "a.py::test_bc"]),
        ("a.py::test_*", ["a.py::test_b", "a.py::test_b[c/d]"], ["a.py::other", "b.py::test_b"]),
        ("*lora]", ["openai/a.py::test_b[c-lora]"], ["openai/a.py::test_b[lora-c]"]),
    ],
)
def test_an_entry_names_a_folder_a_file_a_test_or_a_case(
    entry: str, named: list[str], others: list[str]
) -> None:
    group = Group(Outcome.FAILS, "why", (entry,))
    assert [group.find_pattern(place) for place in named] == [entry] * len(named)
    assert [group.find_pattern(place) for place in others] == [None] * len(others)


def test_an_entry_that_names_no_test_any_more_is_found() -> None:
    groups = (Group(Outcome.FAILS, "why", ("a.py", "b.py")), Group(Outcome.NOT_RUN, "so", ("c.py",)))
    assert find_unused(groups, {"a.py", "c.py"}) == ["b.py"]
    assert find_unused(groups, {"a.py", "b.py", "c.py"}) == []


def test_each_entry_has_one_reason() -> None:
    groups = read_groups()
    entries = Counter(entry for group in groups for entry in group.tests)
    assert entries
    assert set(entries.values()) == {1}
    assert len({group.reason for group in groups}) == len(groups)
    assert all(group.reason.endswith(".") for group in groups)
    assert all(entry.startswith((*FOLDERS, "*")) for entry in entries)
