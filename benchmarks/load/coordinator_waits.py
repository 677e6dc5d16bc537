"""How long rounds wait inside a coordinator, from its metrics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

from benchmarks.load.figures import histogram_quantile

BETWEEN = "between"
"""Place of the wait between acceptance and the next question: text, chunks, the controller."""
_PHASE = re.compile(r'^tandem_round_phase_seconds_bucket\{(.*phase="wait".*)\} (\S+)$', re.MULTILINE)
_PLACE = re.compile(r"^tandem_round_wait_seconds_bucket\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SHARES = {"p50": 0.5, "p99": 0.99}

Counts = Mapping[str, Mapping[float, float]]
"""By place, cumulative counts of waits by upper bound in seconds."""


def read_waits(url: str) -> Counts:
    """Read the waits up to now from a page of metrics; other places than `BETWEEN` only where they are measured."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return waits_of(response.read().decode())


def waits_of(page: str) -> Counts:
    """The waits in a page of metrics, those of all models together."""
    found: dict[str, dict[float, float]] = {}
    for pattern in (_PHASE, _PLACE):
        for labels, value in pattern.findall(page):
            named = dict(_LABEL.findall(labels))
            counts = found.setdefault(named.get("place", BETWEEN), {})
            bound = float(named["le"])
            counts[bound] = counts.get(bound, 0.0) + float(value)
    return found


def quantiles(before: Counts, after: Counts) -> dict[str, dict[str, float]]:
    """Median and p99 of the waits between two readings, in milliseconds by place; without places where none waited."""
    found = {}
    for place, counts in after.items():
        earlier = before.get(place, {})
        buckets = [(bound, counts[bound] - earlier.get(bound, 0.0)) for bound in sorted(counts)]
        if buckets[-1][1] > 0:
            found[place] = {
                name: 1000.0 * histogram_quantile(buckets, share) for name, share in _SHARES.items()
            }
    return found
