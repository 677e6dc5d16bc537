"""From a Prometheus registry to OTLP, so that both exports have the same numbers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, cast

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

import tandem


def to_otlp(families: Iterable[Family], resource: Resource, started_ns: int) -> MetricsData:
    """Counters become cumulative monotonic sums, histograms explicit ones, all else gauges.

    Args:
        families: Metrics from a registry.
        resource: The resource that reports.
        started_ns: Start of the counters, in nanoseconds since 1970.
    """
    now_ns = time.time_ns()
    metrics = [_metric(family, started_ns, now_ns) for family in families if family.samples]
    scope = InstrumentationScope("tandem", tandem.__version__)
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _metric(family: Family, started_ns: int, now_ns: int) -> Metric:
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram([*_histograms(family, started_ns, now_ns)], AggregationTemporality.CUMULATIVE)
    else:
        points = [
            NumberDataPoint(cast(dict[str, Any], sample.labels), started_ns, now_ns, float(sample.value))
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        is_counter = family.type == "counter"
        data = Sum(points, AggregationTemporality.CUMULATIVE, True) if is_counter else Gauge(points)
    return Metric(family.name, family.documentation, family.unit, data)


def _histograms(family: Family, started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    series: defaultdict[tuple[tuple[str, str], ...], list[Sample]] = defaultdict(list)
    for sample in family.samples:
        key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        series[key].append(sample)
    for labels, samples in series.items():
        buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if s.name.endswith("_bucket")]
        total = next((s.value for s in samples if s.name.endswith("_sum")), 0.0)
        below = [0, *(count for _, count in buckets)]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=below[-1],
            sum=total,
            # Prometheus counts all below a bound, OTLP those between two.
            bucket_counts=[count - before for before, count in pairwise(below)],
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            min=cast(float, None),  # neither is known, and both are optional in the protocol
            max=cast(float, None),
        )
