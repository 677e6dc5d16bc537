"""Ranges of the sampling parameters, for requests of clients and for what services are asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tandem.config.rule import Rule, SubjectT, itself, rule, spelled, within
from tandem.types import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, MIN_TEMPERATURE

_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_TEMPERATURES = f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}"
_REPETITION = (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def sampling_rules(of: Callable[[SubjectT], object] = itself) -> tuple[Rule[SubjectT], ...]:
    """Rules for an object with the sampling parameters as attributes, which `of` returns for the subject of the rules;
    None is allowed for each."""

    @rule(f"`temperature` is {_TEMPERATURES}.")
    def temperature(subject: SubjectT) -> Iterator[str]:
        value = getattr(of(subject), "temperature")  # noqa: B009 - of any class
        if value is not None and value != 0.0 and not MIN_TEMPERATURE <= value < math.inf:
            yield f"temperature is {spelled(value)}; it must be {_TEMPERATURES}"

    return (
        temperature,
        within("top_k", 0, 2**31 - 1, f"between 0 and {2**31 - 1} (0 keeps all)", of=of),
        within("top_p", _ABOVE_ZERO, 1.0, "more than 0 and at most 1", of=of),
        within("min_p", 0.0, 1.0, "between 0 and 1", of=of),
        within(
            "repetition_penalty", *_REPETITION, "between {:g} and {:g} (1 is off)".format(*_REPETITION), of=of
        ),
        within("frequency_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=of),
        within("presence_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=of),
    )
