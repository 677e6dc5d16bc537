"""The answers of AdminService as JSON, for `tandem admin` and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any

from tandem.model.speculation_state import SpeculationDecision, SpeculationState
from tandem.model.types import SpeculationStats, StepProfile
from tandem_coordinator.stats.speculation import describe


def plain(value: object) -> Any:
    """A value in the types that JSON has. Speculation statistics become an object with their names."""
    if value is None or type(value) in (str, int, float, bool):
        return _leaf(value)
    if isinstance(value, SpeculationStats):
        return describe(value)
    if isinstance(value, SpeculationState | SpeculationDecision):
        value = value.as_dict()
    if isinstance(value, StepProfile):
        value = [
            {"sequences": sequences, "tokens": tokens, "seconds": seconds}
            for (sequences, tokens), seconds in value.seconds.items()
        ]
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [plain(entry) for entry in value]
        return entries if isinstance(value, list | tuple) else sorted(entries)
    return _leaf(value)


def _leaf(value: object) -> object:
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return round(value, 6) if isinstance(value, float) else value
