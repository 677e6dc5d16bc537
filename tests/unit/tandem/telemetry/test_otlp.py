"""OTLP and Prometheus export the same values."""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.telemetry.process import to_otlp

STARTED_NS = 1_700_000_000_000_000_000


def sent(registry: CollectorRegistry) -> dict[str, metrics_pb2.Metric]:
    data = to_otlp(registry.collect(), Resource({"service.name": "a test"}), STARTED_NS)
    (resource,) = encode_metrics(data).resource_metrics
    assert resource.resource.attributes[0].value.string_value == "a test"
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def test_a_counter_is_a_cumulative_sum() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", ("kind",), registry=registry).labels("good").inc(3)
    metric = sent(registry)["things"]
    assert metric.sum.is_monotonic
    assert metric.sum.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = metric.sum.data_points
    assert point.as_double == 3
    assert point.start_time_unix_nano == STARTED_NS
    assert abs(point.time_unix_nano - time.time_ns()) < 60e9
    assert [(label.key, label.value.string_value) for label in point.attributes] == [("kind", "good")]


def test_a_gauge_stays_one() -> None:
    registry = CollectorRegistry()
    Gauge("level", "Level.", registry=registry).set(True)
    Counter("nothing", "Nothing.", ("kind",), registry=registry)
    found = sent(registry)
    assert set(found) == {"level"}, "metrics without series are left out"
    (point,) = found["level"].gauge.data_points
    assert point.as_double == 1


def test_a_histogram_counts_between_bounds_and_not_below_them() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "Wait.", ("who",), registry=registry, buckets=(1, 2, 4))
    for seconds in (0.5, 1.5, 1.75, 3, 9, 10):
        histogram.labels("a").observe(seconds)
    histogram.labels("b").observe(2)
    metric = sent(registry)["wait_seconds"]
    points = {point.attributes[0].value.string_value: point for point in metric.histogram.data_points}
    assert [*points["a"].explicit_bounds] == [1, 2, 4]
    assert [*points["a"].bucket_counts] == [1, 2, 1, 2]
    assert (points["a"].count, points["a"].sum) == (6, 25.75)
    assert [*points["b"].bucket_counts] == [0, 1, 0, 0]
    assert not points["a"].HasField("min")
