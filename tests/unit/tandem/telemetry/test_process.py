"""The metrics endpoint, an unreachable collector, and values that OTLP and Prometheus export alike."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as UsualHistogram

from tandem.engine.interface import KvUsage
from tandem.errors import ConfigurationError, NotFoundError, ServiceUnavailableError
from tandem.model.types import SpeculationStats
from tandem.telemetry.metrics import Histogram, name_metrics, on_loop
from tandem.telemetry.process import OtlpExports, Telemetry, to_otlp
from tandem.telemetry.service import ObservedService
from tandem.telemetry.settings import TelemetryOptions, is_observed
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.telemetry.metrics import RequestMetrics
from tandem_coordinator.telemetry.observed import ObservedRequest, ObservedRequests, probe_event_loop
from tandem_coordinator.telemetry.observer import CHAT, OPERATIONS, Choices, State
from tests.end_to_end.processes import run
from tests.service.clients import until


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "TRACES_", "METRICS_"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)


async def test_metrics_are_served() -> None:
    telemetry = Telemetry(TelemetryOptions(prometheus_port=0), "target")
    telemetry.start()
    url = f"http://127.0.0.1:{telemetry.prometheus_port}/metrics"
    try:
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=5) as response:
            text = response.read().decode()
    finally:
        await telemetry.close()
    assert 'tandem_build_info{service="target"' in text
    assert "process_cpu_seconds_total" in text
    assert "_created" not in text


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        telemetry = Telemetry(TelemetryOptions(prometheus_port=port), "draft")
        with pytest.raises(
            ConfigurationError, match=rf"cannot serve metrics on 127\.0\.0\.1:{port}: .*--prometheus-port"
        ):
            telemetry.start()
        await telemetry.close()


def test_telemetry_is_off_without_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_observed(TelemetryOptions())
    assert is_observed(TelemetryOptions(), is_read=True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert is_observed(TelemetryOptions())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not is_observed(TelemetryOptions())


def test_without_telemetry_its_libraries_are_not_even_imported() -> None:
    code = (
        "import sys, tandem_coordinator.__main__, tandem_draft.__main__, tandem_target.__main__\n"
        "from tandem_coordinator.service import CoordinatorService\n"
        "from tandem_coordinator.settings.coordinator import CoordinatorSettings\n"
        "from tandem_draft.settings import DraftSettings\n"
        "from tandem_draft.service import DraftService\n"
        "CoordinatorService(CoordinatorSettings(target_address='127.0.0.1:1'))\n"
        "DraftService(DraftSettings(speculative_method='ngram'))\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'opentelemetry', 'prometheus_client'}))"
    )
    done = run(sys.executable, "-c", code)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("accepts", [False, True], ids=["nobody listens", "it never answers"])
async def test_an_absent_collector_costs_a_log_line(caplog: pytest.LogCaptureFixture, accepts: bool) -> None:
    """Spans and metrics are dropped, and the exit is delayed by at most two seconds."""
    caplog.set_level(logging.WARNING)
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if accepts:
            collector.listen()
        await _end_with_collector_gone(f"http://127.0.0.1:{collector.getsockname()[1]}")
    ours = [record for record in caplog.records if record.name.startswith("tandem")]
    assert len(ours) <= 1
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def _end_with_collector_gone(endpoint: str) -> None:
    telemetry = Telemetry(TelemetryOptions(otlp_endpoint=endpoint), "coordinator")
    telemetry.start()
    for _ in range(5_000):  # more than the queue holds
        telemetry.tracer.start_span("text_completion").end()
    await telemetry.close()


def test_warnings_are_rare_and_losses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    options = TelemetryOptions(otlp_endpoint="http://127.0.0.1:1")
    exports = OtlpExports(options, Resource({}), registry)
    for _ in range(10):
        exports.lost("traces")
    exports.lost("metrics")
    assert len(caplog.messages) == 1
    name = "tandem_telemetry_export_failures_total"
    assert registry.get_sample_value(name, {"signal": "traces"}) == 10
    assert registry.get_sample_value(name, {"signal": "metrics"}) == 1


async def test_values_of_the_event_loop_are_read_on_it_and_an_error_reaches_the_reader() -> None:
    read = on_loop(threading.get_ident)
    here = threading.get_ident()
    assert read() == here
    assert await asyncio.to_thread(read) == here
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(on_loop(lambda: 1 // 0))


async def test_other_threads_have_the_values_refreshed_before() -> None:
    value = 1

    async def refresh() -> None:
        nonlocal value
        await asyncio.sleep(0)
        value = 2

    read = on_loop(lambda: value, refresh)
    assert read() == 1
    assert await asyncio.to_thread(read) == 2


STARTED_NS = 1_700_000_000_000_000_000


def sent(registry: CollectorRegistry) -> dict[str, metrics_pb2.Metric]:
    data = to_otlp(registry.collect(), Resource({"service.name": "a test"}), STARTED_NS)
    (resource,) = encode_metrics(data).resource_metrics
    assert resource.resource.attributes[0].value.string_value == "a test"
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def test_a_histogram_counts_between_bounds_and_not_below_them() -> None:
    registry = CollectorRegistry()
    histogram = UsualHistogram("wait_seconds", "Wait.", ("who",), registry=registry, buckets=(1, 2, 4))
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


BOUNDS = (0.001, 0.5, 2.0)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.25, 0.5, 1.0, 2.0, 2.5, 64.0])))
def test_the_light_histogram_agrees_with_prometheus_client(values: list[float]) -> None:
    light, usual = CollectorRegistry(), CollectorRegistry()
    light.register(whole := Histogram("seconds", "Text.", ("who",), BOUNDS))
    series = whole.labels("a")
    child = UsualHistogram("seconds", "Text.", ("who",), registry=usual, buckets=BOUNDS).labels("a")
    for value in values:
        series.observe(value)
        child.observe(value)
    assert _lines(light) == _lines(usual)


def _lines(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


SECONDS = 30.0


async def test_waits_are_observed_on_the_loop_until_that_is_cancelled() -> None:
    waits: list[float] = []
    threads: set[int] = set()

    def observe(seconds: float) -> None:
        waits.append(seconds)
        threads.add(threading.get_ident())

    probe = asyncio.create_task(probe_event_loop(observe, interval_seconds=0.001))
    await until(lambda: len(waits) >= 3, SECONDS)
    probe.cancel()
    await asyncio.sleep(0.005)  # what was handed over before it was closed
    count = len(waits)
    await asyncio.sleep(0.01)
    assert len(waits) == count
    assert min(waits) > 0.0
    assert threads == {threading.get_ident()}


def test_units_and_names_are_opentelemetrys() -> None:
    registry = CollectorRegistry()
    Counter("tandem_wire_bytes", "Bytes.", registry=registry).inc()
    first = UsualHistogram("tandem_time_to_first_token_seconds", "T.", ("model_name",), registry=registry)
    first.labels("m").observe(0.5)
    found = sent(registry)
    assert {name: metric.unit for name, metric in found.items()} == {
        "tandem_wire_bytes": "By",
        "tandem_time_to_first_token_seconds": "s",
        "gen_ai.server.time_to_first_token": "s",
    }
    (point,) = found["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (point.count, point.sum) == (1, 0.5)
    assert {label.key: label.value.string_value for label in point.attributes} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "m",
    }


CONVENTIONS = json.loads(Path(__file__).with_name("gen_ai_conventions.json").read_text())
"""Of OpenTelemetry's registry for generative AI, the part that a model server can have."""


def test_names_and_units_are_those_of_the_conventions_for_generative_ai() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, model_name="m")
    metrics.time_to_first_token_seconds[CHAT].observe(0.5)
    metrics.request_time_per_output_token_seconds[CHAT].observe(0.5)
    for error_type in ("", "unavailable"):
        metrics.e2e_request_latency_seconds(CHAT, error_type).observe(0.5)
    found = {name: metric for name, metric in sent(registry).items() if name.startswith("gen_ai.")}
    assert {name: metric.unit for name, metric in found.items()} == CONVENTIONS["metrics"]
    for metric in found.values():
        points = [
            {label.key: label.value.string_value for label in point.attributes}
            for point in metric.histogram.data_points
        ]
        assert {point["gen_ai.operation.name"] for point in points} == set(OPERATIONS)
        assert {name for point in points for name in point} <= CONVENTIONS["attributes"].keys()
    assert set(OPERATIONS) <= set(CONVENTIONS["operations"])


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (None, None),
        (ServiceUnavailableError("no target"), "unavailable"),
        (NotFoundError("no such model"), "not_found"),
        (ValueError("a fault"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_the_duration_of_a_failed_request_has_the_kind_of_its_error(
    error: BaseException | None, name: str | None
) -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, model_name="m")
    requests = ObservedRequests(CoordinatorSettings(target_address="127.0.0.1:1"))
    ObservedRequest(requests, metrics, INVALID_SPAN, Choices(CHAT)).finished(error)
    points = sent(registry)["gen_ai.server.request.duration"].histogram.data_points
    (ended,) = (point for point in points if point.count)
    attributes = {label.key: label.value.string_value for label in ended.attributes}
    assert attributes.get("error.type") == name
    assert "error_type" not in attributes
    (reported,) = (
        sample.value
        for family in name_metrics(registry, TelemetryOptions(metric_names="vllm")).collect()
        for sample in family.samples
        if sample.name == "vllm:e2e_request_latency_seconds_count"
    )
    assert reported == 1, "vLLM has one series for all of them"


NOT_HERE = {
    "engine_sleep_state": "services do not sleep",
    "corrupted_requests": "a request whose logits are not finite ends with an error, and counts as such",
    "watermark_requests": "nothing is watermarked",
    "external_prefix_cache_queries": "no cache lies outside of a service",
    "external_prefix_cache_hits": "the same",
    "prompt_tokens_cached_by_source": "the same: all of it is prompt_tokens_cached",
    "num_requests_kv_fetch_by_stage": "KV caches are not handed over",
    "mm_cache_queries": "the models read text",
    "mm_cache_hits": "the same",
    "kv_block_lifetime_seconds": "blocks are not sampled",
    "kv_block_idle_before_evict_seconds": "the same",
    "kv_block_reuse_gap_seconds": "the same",
    "lora_requests_info": "there are no adapters",
}
"""Metrics of vLLM's that nothing here has, and why not."""
VLLM = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_kv_fetch_by_stage
engine_sleep_state kv_cache_usage_perc corrupted_requests watermark_requests prefix_cache_queries prefix_cache_hits
external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions prompt_tokens
prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens request_success
admission_rejections cache_config_info request_prompt_tokens request_generation_tokens iteration_tokens_total
request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds request_num_preemptions
request_prefill_kv_computed_tokens kv_block_lifetime_seconds kv_block_idle_before_evict_seconds
kv_block_reuse_gap_seconds lora_requests_info spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
"""
"""The families of vLLM 0.33 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py)."""


async def test_every_metric_of_vllms_is_there_or_has_a_reason() -> None:
    options = TelemetryOptions(metric_names="vllm")
    observed = ObservedRequests(CoordinatorSettings(target_address="127.0.0.1:1"))
    observed.ready("m", lambda: State("m", 2, 0, 0, 0, {}, SpeculationStats()))
    service = ObservedService(options, "target")
    service.ready("m", lambda: KvUsage(1, 0, 0, 0, 0))
    found = {
        family.name.removeprefix("vllm:")
        for registry in (observed.registry, service.registry)
        for family in name_metrics(registry, options).collect()
        if family.name.startswith("vllm:")
    }
    assert found == set(VLLM.split()) - NOT_HERE.keys()
    assert NOT_HERE.keys() <= set(VLLM.split())


def test_metrics_may_have_vllms_names() -> None:
    registry = CollectorRegistry()
    requests = Counter("tandem_requests", "R.", ("model_name", "outcome"), registry=registry)
    requests.labels("m", "stop").inc(2)
    requests.labels("m", "error").inc()
    name = "tandem_spec_decode_num_accepted_tokens_per_pos"
    Counter(name, "A.", ("model_name", "position"), registry=registry).labels("m", "1").inc(5)
    labels = ("model_name", "operation", "error_type")
    latency = UsualHistogram("tandem_e2e_request_latency_seconds", "L.", labels, registry=registry)
    for operation in ("chat", "text_completion"):
        latency.labels("m", operation, "").observe(0.5)
    Gauge("tandem_round_things", "Ours.", registry=registry).set(1)
    lines = (
        generate_latest(name_metrics(registry, TelemetryOptions(metric_names="vllm"))).decode().splitlines()
    )
    for line in (
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 5.0',
        'vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="m"} 2.0',
        "tandem_round_things 1.0",
    ):
        assert line in lines
    assert not any('"error"' in line for line in lines)
    assert name_metrics(registry, TelemetryOptions()) is registry
