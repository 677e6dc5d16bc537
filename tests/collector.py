"""A small OpenTelemetry collector that stores what it receives by OTLP/gRPC."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span and its sender."""

    service: str
    span: trace_pb2.Span

    @property
    def attributes(self) -> dict[str, object]:
        return _plain(self.span.attributes)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans, and the last value of each metric by service and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._metrics: dict[tuple[str, str], metrics_pb2.Metric] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Metrics(self), self._server
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return [*self._spans]

    @property
    def metrics(self) -> dict[tuple[str, str], metrics_pb2.Metric]:
        """By service and name."""
        with self._lock:
            return dict(self._metrics)

    def kill(self) -> None:
        """Stop receiving."""
        self._server.stop(0).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                service = str(_plain(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self._spans += [ReceivedSpan(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def keep(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_metrics:
                service = str(_plain(resource.resource.attributes)["service.name"])
                for scope in resource.scope_metrics:
                    self._metrics |= {(service, metric.name): metric for metric in scope.metrics}


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._collector.keep(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector during the block."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.kill()


def _plain(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in attributes}
