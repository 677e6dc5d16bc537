"""One request through three real processes is one trace; metrics are pushed and scraped."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from tandem.clients.client import Client
from tandem.model.types import GenerationRequest
from tests.end_to_end.processes import (
    NO_KERNELS,
    Process,
    address_of,
    coordinator,
    metrics_of,
    model_service,
    read,
    total,
    until,
)
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import complete


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span and its sender."""

    service: str
    span: trace_pb2.Span

    @property
    def attributes(self) -> dict[str, object]:
        return _plain(self.span.attributes)


class Collector:
    """Keeps spans, and the last value of each metric by service and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._metrics: dict[tuple[str, str], metrics_pb2.Metric] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        for service, request, keep in (
            ("trace.v1.TraceService", ExportTraceServiceRequest, self._keep_spans),
            ("metrics.v1.MetricsService", ExportMetricsServiceRequest, self._keep_metrics),
        ):
            export: Any = grpc.unary_unary_rpc_method_handler(keep, request.FromString, lambda _: b"")
            name = f"opentelemetry.proto.collector.{service}"
            handler = grpc.method_handlers_generic_handler(name, {"Export": export})
            self._server.add_generic_rpc_handlers((handler,))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return [*self._spans]

    @property
    def metrics(self) -> dict[tuple[str, str], metrics_pb2.Metric]:
        with self._lock:
            return dict(self._metrics)

    def close(self) -> None:
        self._server.stop(0).wait()

    def _keep_spans(self, request: ExportTraceServiceRequest, _: object) -> None:
        with self._lock:
            for resource in request.resource_spans:
                service = str(_plain(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self._spans += [ReceivedSpan(service, span) for span in scope.spans]

    def _keep_metrics(self, request: ExportMetricsServiceRequest, _: object) -> None:
        with self._lock:
            for resource in request.resource_metrics:
                service = str(_plain(resource.resource.attributes)["service.name"])
                for scope in resource.scope_metrics:
                    self._metrics |= {(service, metric.name): metric for metric in scope.metrics}


def _plain(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in attributes}


REQUEST = GenerationRequest("def add(a, b):\n", max_tokens=32, temperature=0.0, ignore_eos=True)
SERVICES = ("coordinator", "draft", "target")
pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Cluster:
    """The demo pair as three processes that send to one collector."""

    collector: Collector
    processes: dict[str, Process]

    @property
    def address(self) -> str:
        return address_of(self.processes["coordinator"])

    def scraped(self, service: str) -> str:
        return metrics_of(self.processes[service])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        collector = Collector()
        stack.callback(collector.close)
        options = ("--otlp-endpoint", collector.endpoint, "--prometheus-port", "0")
        target = stack.enter_context(model_service("tandem_target", DEMO_TARGET, *NO_KERNELS, *options))
        draft = stack.enter_context(model_service("tandem_draft", DEMO_DRAFT, *NO_KERNELS, *options))
        joined = stack.enter_context(
            coordinator(
                address_of(target), address_of(draft), "--trace-rounds", "1", "--http-port", "0", *options
            )
        )
        yield Cluster(collector, {"coordinator": joined, "draft": draft, "target": target})


def path(span: ReceivedSpan, spans: dict[bytes, ReceivedSpan]) -> tuple[str, ...]:
    """Return services and names from the root down to the span."""
    above = () if span.span.parent_span_id not in spans else path(spans[span.span.parent_span_id], spans)
    return (*above, f"{span.service} {span.span.name}")


async def test_a_request_is_one_trace_across_all_services(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        completed = await complete(client, REQUEST)
    until(
        lambda: {span.service for span in cluster.collector.spans} >= {f"tandem-{name}" for name in SERVICES},
        10,
    )
    rounds = completed.speculation.rounds
    until(lambda: len(cluster.collector.spans) >= rounds + 8, 10, lambda: str(len(cluster.collector.spans)))
    spans = {span.span.span_id: span for span in cluster.collector.spans}
    assert len({span.span.trace_id for span in spans.values()}) == 1
    root = "tandem-coordinator text_completion target"
    propose = "tandem.v1.DraftService/Propose"
    verify = "tandem.v1.TargetService/Verify"
    paths = [path(span, spans) for span in spans.values()]
    assert paths.count((root, "tandem-coordinator round")) == rounds
    assert sorted(each for each in paths if "tandem-coordinator round" not in each) == sorted(
        [
            (root,),
            (root, "tandem-coordinator prefill"),
            (root, f"tandem-coordinator {propose}"),
            (root, f"tandem-coordinator {propose}", f"tandem-draft {propose}"),
            (root, f"tandem-coordinator {propose}", f"tandem-draft {propose}", "tandem-draft prefill"),
            (root, f"tandem-coordinator {verify}"),
            (root, f"tandem-coordinator {verify}", f"tandem-target {verify}"),
            (root, f"tandem-coordinator {verify}", f"tandem-target {verify}", "tandem-target prefill"),
        ]
    )
    (attributes,) = (span.attributes for span in spans.values() if not span.span.parent_span_id)
    assert attributes["tandem.rounds"] == rounds
    assert attributes["tandem.accepted_tokens"] == completed.speculation.accepted
    assert attributes["gen_ai.usage.output_tokens"] == 32


async def test_otlp_and_prometheus_get_the_same_metrics(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        await complete(client, REQUEST)
    scraped = {service: cluster.scraped(service) for service in SERVICES}
    tokens = total(scraped["coordinator"], "tandem_generation_tokens_total")
    assert tokens >= 32

    def sent() -> float:
        metric = cluster.collector.metrics.get(("tandem-coordinator", "tandem_generation_tokens"))
        return 0.0 if metric is None else metric.sum.data_points[0].as_double

    until(lambda: sent() == tokens, 10, lambda: f"{sent()} instead of {tokens}")
    for service in ("draft", "target"):
        labels = f'{{model_name="{service}",role="{service}"}}'
        assert f"tandem_kv_cache_capacity_tokens{labels}" in scraped[service]
        assert total(scraped[service], "tandem_engine_step_seconds_count") > 0
        name = (f"tandem-{service}", "tandem_engine_step_seconds")
        until(lambda name=name: name in cluster.collector.metrics, 10)  # type: ignore[misc]
    assert 'tandem_replicas{model_name="target",role="draft",state="ready"} 1.0' in scraped["coordinator"]


def test_a_trace_of_a_browser_continues(cluster: Cluster) -> None:
    trace_id = "0123456789abcdef0123456789abcdef"
    url = cluster.processes["coordinator"].line("http on ").strip()
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": "target", "prompt": "def add(", "max_tokens": 4}).encode(),
        {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4

    def services() -> set[str]:
        return {span.service for span in cluster.collector.spans if span.span.trace_id.hex() == trace_id}

    until(lambda: services() == {f"tandem-{name}" for name in SERVICES}, 10, lambda: str(services()))
    assert "tandem_generation_tokens_total" in read(f"{url}/metrics")
