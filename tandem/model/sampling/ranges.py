"""Ranges of the sampling parameters, for requests of clients and for what services are asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tandem.config.rule import Rule, SubjectT, itself, rule, spell, within
from tandem.model.types import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, MIN_TEMPERATURE

_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_COMPUTED = f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}"
_REQUESTED = f"a finite number of at least 0 (below {MIN_TEMPERATURE:g} it counts as 0: greedy)"
_REPETITION = (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def sampling_rules(of: Callable[[SubjectT], object] = itself) -> tuple[Rule[SubjectT], ...]:
    """Rules for an object with the sampling parameters as attributes, which `of` returns for the subject of the rules;
    None is allowed for each. They are for what services compute."""
    return (_temperature(of, _COMPUTED, MIN_TEMPERATURE), *_other_rules(of))


def request_sampling_rules(of: Callable[[SubjectT], object] = itself) -> tuple[Rule[SubjectT], ...]:
    """The same for what clients ask for: temperatures that are too low to compute are greedy."""
    return (_temperature(of, _REQUESTED, 0.0), *_other_rules(of))


def _temperature(of: Callable[[SubjectT], object], words: str, minimum: float) -> Rule[SubjectT]:
    @rule(f"`temperature` is {words}.")
    def temperature(subject: SubjectT) -> Iterator[str]:
        value = getattr(of(subject), "temperature")  # noqa: B009 - of any class
        if value is not None and value != 0.0 and not minimum <= value < math.inf:
            yield f"temperature is {spell(value)}; it must be {words}"

    return temperature


def _other_rules(of: Callable[[SubjectT], object]) -> tuple[Rule[SubjectT], ...]:
    return (
        within("top_k", 0, 2**31 - 1, f"between 0 and {2**31 - 1} (0 keeps all)", of=of),
        within("top_p", _ABOVE_ZERO, 1.0, "more than 0 and at most 1", of=of),
        within("min_p", 0.0, 1.0, "between 0 and 1", of=of),
        within(
            "repetition_penalty", *_REPETITION, "between {:g} and {:g} (1 is off)".format(*_REPETITION), of=of
        ),
        within("frequency_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=of),
        within("presence_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=of),
    )
