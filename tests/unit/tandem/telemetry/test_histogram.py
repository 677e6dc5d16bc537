"""The light histogram agrees with prometheus_client's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as UsualHistogram

from tandem.telemetry.metrics import Histogram

BOUNDS = (0.001, 0.5, 2.0)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.25, 0.5, 1.0, 2.0, 2.5, 64.0])))
def test_the_light_histogram_agrees_with_prometheus_client(values: list[float]) -> None:
    light, usual = CollectorRegistry(), CollectorRegistry()
    series = Histogram("seconds", "Text.", ("who",), BOUNDS, light).labels("a")
    child = UsualHistogram("seconds", "Text.", ("who",), registry=usual, buckets=BOUNDS).labels("a")
    for value in values:
        series.observe(value)
        child.observe(value)
    assert _lines(light) == _lines(usual)


def _lines(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)
