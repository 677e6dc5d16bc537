"""What `tandem admin` shows people: numbers, states and tables."""

from __future__ import annotations

from rich.text import Text

from coordinator.stats.ahead import hit_rate
from tandem.replica import ReplicaState
from tandem.types import AheadStats

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

NOTHING = "-"
"""Shown for a value that does not exist yet."""

_STATE_STYLES = {
    ReplicaState.READY: "green",
    ReplicaState.CONNECTING: "yellow",
    ReplicaState.DRAINING: "yellow",
    ReplicaState.INCOMPATIBLE: "red",
    ReplicaState.REFUSED: "red",
    ReplicaState.DOWN: "red",
}


def duration(seconds: float) -> str:
    """A length of time in its two largest units: 45s, 12m 5s, 3h 2m, 4d 7h."""
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m {whole % _MINUTE}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h {whole % _HOUR // _MINUTE}m"
    return f"{whole // _DAY}d {whole % _DAY // _HOUR}h"


def milliseconds(seconds: float | None) -> str:
    """Format a short time with its significant digits."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def percent(part: float, whole: float = 1.0) -> str:
    """A share; nothing of nothing is no share."""
    return f"{part / whole:.1%}" if whole else NOTHING


def plural(count: int, noun: str) -> str:
    """1 token, 1,024 tokens: as `tandem.plural`, with the digits of large numbers in groups."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bar(share: float, width: int) -> str:
    """A share as a bar of at most `width` cells, in eighths of a cell."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def state(value: ReplicaState) -> Text:
    """A replica's state in its colour."""
    return Text(value.value, style=_STATE_STYLES[value])


def ahead_words(ahead: AheadStats) -> str:
    """Gain of drafting ahead."""
    rounds = plural(ahead.awaited, "round")
    return f"{percent(hit_rate(ahead))} of {rounds}, {ahead.saved_seconds:,.2f} s of waiting saved"
