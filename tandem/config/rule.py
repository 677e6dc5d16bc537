"""Rules: conditions with a name, and a sentence for each violation.

Sentences name the option, its value and what the value must be. All rules of a table are always checked, so that every
violation is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    options: tuple[str, ...] = ()
    """The options that it reads: when one of them cannot be read at all, the rule says nothing."""


Rules = tuple[Rule[Any], ...]


def rule(requirement: str, *options: str) -> Callable[[Callable[[SubjectT], Iterable[str]]], Rule[SubjectT]]:
    """Make a rule of a function, under the function's name. For the arguments see `Rule`."""

    def made(broken_by: Callable[[SubjectT], Iterable[str]]) -> Rule[SubjectT]:
        return Rule(_name(broken_by.__name__.removeprefix("_")), requirement, broken_by, options)

    return made


def broken(rules: Sequence[Rule[SubjectT]], subject: SubjectT, unreadable: Collection[str] = ()) -> list[str]:
    """A sentence for each way in which the subject breaks a rule."""
    return [
        sentence
        for rule in rules
        if not set(rule.options) & set(unreadable)
        for sentence in rule.broken_by(subject)
    ]


def refuse(sentences: Iterable[str]) -> None:
    """Refuse a request for all of these reasons at once; do nothing without any."""
    if joined := "; ".join(sentences):
        raise InvalidRequestError(joined)


def itself(subject: object) -> object:
    """The subject: its own attributes are the options."""
    return subject


def at_least(option: str, minimum: float, *, of: Callable[[SubjectT], object] = itself) -> Rule[SubjectT]:
    """The rule that an option is not below a number. None keeps it."""
    return within(option, minimum, math.inf, f"at least {minimum:g}", of=of)


def within(
    option: str, low: float, high: float, words: str, *, of: Callable[[SubjectT], object] = itself
) -> Rule[SubjectT]:
    """The rule that an option lies between two numbers, both allowed; `words` describes them. None is allowed."""

    def check(subject: SubjectT) -> Iterator[str]:
        value = getattr(of(subject), option)
        if value is not None and not low <= value <= high:
            yield f"{option} is {spelled(value)}; it must be {words}"

    return Rule(_name(option), f"`{option}` is {words}.", check, (option,))


def always(option: str, needed: object, why: str) -> Rule[SubjectT]:
    """The rule that an option has the one value that is supported."""

    def check(subject: SubjectT) -> Iterator[str]:
        value = getattr(subject, option)
        if value != needed:
            yield f"{option} is {spelled(value)}; it must be {spelled(needed)}: {why}"

    return Rule(_name(option), f"`{option}` is {spelled(needed)}: {why}.", check, (option,))


def spelled(value: object) -> str:
    """A value as a configuration file spells it, with all its digits."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(option: str) -> str:
    return option.replace("_", "-")
