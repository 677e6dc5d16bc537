"""The list of tests that do not pass here, `listed.toml`: its groups, and which tests a pattern names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

FOLDERS = ("anthropic", "openai", "serve")
"""Folders of vLLM's `tests/entrypoints` whose tests ask a server over HTTP."""


class Outcome(Enum):
    """How the tests of a group end."""

    NOT_RUN = "not_run"
    """They are not even started: they ask no server, or for a model that does not write text."""
    FAILS = "fails"
    """They fail. If one passes, the list is out of date."""
    VARIES = "varies"
    """They pass or fail by the words that a small model finds."""


@dataclass(frozen=True)
class Group:
    """Tests with the same reason."""

    outcome: Outcome
    reason: str
    tests: tuple[str, ...]

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        return {test: _compile(test) for test in self.tests}

    def find_pattern(self, place: str) -> str | None:
        """Return the first entry that names a test or a file, by its place below `tests/entrypoints`."""
        for test, pattern in self._patterns.items():
            if pattern.fullmatch(place):
                return test
        return None


def describe_passed(place: str, reason: str) -> str:
    """Return what to do about a test that passes, against the list."""
    return (
        f"{place} passes, and tests/peer/listed.toml says that it fails ({reason}) Take it out of the list, or name "
        "it under [[varies]] if it passes by chance."
    )


def find_unused(groups: Iterable[Group], used: Collection[str]) -> list[str]:
    """Return the entries that are none of those used: they name no test any more."""
    return [test for group in groups for test in group.tests if test not in used]


def _compile(test: str) -> re.Pattern[str]:
    """An entry names a folder, a file, a test or one of its cases; `*` stands for any characters."""
    return re.compile(re.escape(test).replace(r"\*", ".*") + r"([/:\[].*)?")


def read_groups() -> tuple[Group, ...]:
    """Read the list."""
    listed = tomllib.loads(Path(__file__).with_name("listed.toml").read_text(encoding="utf-8"))
    return tuple(
        Group(outcome, entry["reason"], tuple(entry["tests"]))
        for outcome in Outcome
        for entry in listed.get(outcome.value, ())
    )
