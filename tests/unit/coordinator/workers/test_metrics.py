"""Metrics of several processes become those of one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coordinator.workers.metrics import cumulative, merged, read, to_text


def process(tokens: int, running: int, rate: float, seconds: list[float]) -> str:
    """The metrics of a process as it writes them."""
    registry = CollectorRegistry()
    Counter("tandem_generation_tokens", "Tokens.", ("model_name",), registry=registry).labels("m").inc(tokens)
    Gauge("tandem_num_requests_running", "Running.", ("model_name",), registry=registry).labels("m").set(
        running
    )
    Gauge("tandem_spec_decode_acceptance_rate", "Rate.", registry=registry).set(rate)
    replicas = Gauge("tandem_replicas", "Replicas.", ("role",), registry=registry)
    replicas.labels("target").set(2)
    Gauge("tandem_replica_ready", "Ready.", ("address",), registry=registry).labels("a:1").set(running > 1)
    histogram = Histogram("tandem_prefill_seconds", "Prefill.", buckets=(0.1, 1.0), registry=registry)
    for each in seconds:
        histogram.observe(each)
    return generate_latest(registry).decode()


ONE, OTHER = process(10, 1, 0.5, [0.05, 0.5]), process(32, 2, 0.7, [0.5, 5.0])


def value(families: object, name: str, **labels: str) -> float:
    assert isinstance(families, dict)
    found = [
        each
        for family in families.values()
        for (sample, own), each in family.series.items()
        if sample == name and labels.items() <= dict(own).items()
    ]
    assert len(found) == 1
    result: float = found[0]
    return result


def test_counters_histograms_and_loads_are_added() -> None:
    both = merged([read(ONE), read(OTHER)])
    assert value(both, "tandem_generation_tokens_total", model_name="m") == 42
    assert value(both, "tandem_num_requests_running") == 3
    assert value(both, "tandem_prefill_seconds_count") == 4
    assert value(both, "tandem_prefill_seconds_sum") == 6.05
    assert [value(both, "tandem_prefill_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 3, 4]


def test_what_all_say_of_the_same_thing_is_not_added() -> None:
    both = merged([read(ONE), read(OTHER)])
    assert value(both, "tandem_replicas", role="target") == 2
    assert value(both, "tandem_replica_ready", address="a:1") == 0, "one of them cannot reach it"
    assert abs(value(both, "tandem_spec_decode_acceptance_rate") - 0.6) < 1e-9


def test_the_text_can_be_read_again_and_is_that_of_a_single_process() -> None:
    families = read(ONE)
    assert read(to_text(merged([families])).decode()) == families


def test_counts_outlive_their_process_and_loads_do_not() -> None:
    past = cumulative(read(ONE))
    both = merged([read(OTHER), past])
    assert value(both, "tandem_generation_tokens_total", model_name="m") == 42
    assert value(both, "tandem_num_requests_running") == 2
