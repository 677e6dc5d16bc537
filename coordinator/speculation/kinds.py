"""Which requests share acceptance counts."""

from __future__ import annotations

from typing import NamedTuple

TEMPERATURE_RANGES = (0.0, 0.3, 0.6, 0.85, 1.15)
"""Upper ends of the temperature ranges that share acceptance counts; the last range is open."""


class RequestKind(NamedTuple):
    """Requests that share acceptance counts."""

    draft: str
    """Name of the draft's model."""
    rule: str
    """Name of the acceptance rule."""
    temperature_range: int
    """Index into `TEMPERATURE_RANGES`; its length for temperatures above the last."""


def request_kind(draft: str, rule: str, temperature: float) -> RequestKind:
    """The kind of a request."""
    index = next(
        (i for i, end in enumerate(TEMPERATURE_RANGES) if temperature <= end), len(TEMPERATURE_RANGES)
    )
    return RequestKind(draft, rule, index)


def temperature_words(temperature_range: int) -> str:
    """A temperature range in words, for instance "0.85-1.15"."""
    ends = TEMPERATURE_RANGES
    if temperature_range == 0:
        return "0"
    lower = f"{ends[temperature_range - 1]:g}"
    return f"{lower}-{ends[temperature_range]:g}" if temperature_range < len(ends) else f"above {lower}"
