"""Rules: conditions with a name, and a sentence for each violation.

Sentences name the option, its value and what the value must be. All rules of a table are always checked, so that every
violation is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.errors import InvalidRequestError

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True, slots=True)
class Rule(Generic[SubjectT]):
    """One thing that must hold."""

    name: str
    requirement: str
    """The rule in one sentence, for the documentation."""
    broken_by: Callable[[SubjectT], Iterable[str]]
    """The sentences that say how the subject breaks the rule; none when it keeps it."""


Rules = tuple[Rule[Any], ...]


def rule(requirement: str) -> Callable[[Callable[[SubjectT], Iterable[str]]], Rule[SubjectT]]:
    """Make a rule of a function, under the function's name."""
    return lambda broken_by: _rule(broken_by.__name__.removeprefix("_"), requirement, broken_by)


def _rule(option: str, requirement: str, check: Callable[[SubjectT], Iterable[str]]) -> Rule[SubjectT]:
    return Rule(option.replace("_", "-"), requirement, check)


def broken(rules: Sequence[Rule[SubjectT]], subject: SubjectT) -> list[str]:
    """A sentence for each way in which the subject breaks a rule."""
    return [sentence for rule in rules for sentence in rule.broken_by(subject)]


def refuse(sentences: Iterable[str]) -> None:
    """Refuse a request for all of these reasons at once; do nothing without any."""
    if joined := "; ".join(sentences):
        raise InvalidRequestError(joined)


def itself(subject: object) -> object:
    """The subject: its own attributes are the options."""
    return subject


def within(
    option: str,
    low: float,
    high: float = math.inf,
    words: str = "",
    *,
    of: Callable[[SubjectT], object] = itself,
) -> Rule[SubjectT]:
    """The rule that an option lies between two numbers, both allowed; `words` describes them. None is allowed."""
    words = words or f"at least {low:g}"

    def check(subject: SubjectT) -> Iterator[str]:
        value = getattr(of(subject), option)
        if value is not None and not low <= value <= high:
            yield f"{option} is {spell(value)}; it must be {words}"

    return _rule(option, f"`{option}` is {words}.", check)


def not_below(option: str, other: str, why: str = "") -> Rule[Any]:
    """The rule that an option is at least as much as another one."""

    def check(subject: object) -> Iterator[str]:
        value = getattr(subject, option)
        minimum = getattr(subject, other)
        if value < minimum:
            yield f"{option} is {value}; it must be at least {other} ({minimum}){why}"

    return _rule(option, f"`{option}` is at least `{other}`.", check)


def always(option: str, needed: object, why: str) -> Rule[Any]:
    """The rule that an option has the one value that is supported."""

    def check(subject: object) -> Iterator[str]:
        value = getattr(subject, option)
        if value != needed:
            yield f"{option} is {spell(value)}; it must be {spell(needed)}: {why}"

    return _rule(option, f"`{option}` is {spell(needed)}: {why}.", check)


def spell(value: object) -> str:
    """A value as a configuration file spells it, with all its digits."""
    if isinstance(value, tuple):
        return ",".join(map(spell, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
