"""Parts of metrics: bounds of histograms, histograms that cost little, and values read at scrape time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.errors import ConfigurationError
from tandem.telemetry.names import registry_as_vllm
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

# Each bound is about twice the one before, over the range that is seen.
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""A part of a round, from a short computation to a lost peer."""
LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Seconds that a client waits."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the buckets for counts."""


ValueT = TypeVar("ValueT")


class Series:
    """One series of a histogram, written by one thread."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket: above the bound before, up to its own."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """A histogram whose values come from one thread, several for each round.

    A value costs 0.14 us. prometheus_client's histogram takes a lock or two for it (0.7 us); OpenTelemetry's takes
    5.9 us, which cost a coordinator with 64 streams a quarter of its tokens per second.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = label_names
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        return self._series.setdefault(values, Series(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in [*self._series.items()]:
            below = accumulate([*series.counts])
            family.add_metric(values, [*zip(names, below, strict=True)], series.total)
        yield family


def family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    common: Mapping[str, str],
    name: str,
    text: str,
    values: Mapping[Any, float | None],
    *label_names: str,
) -> Metric:
    """One of our metrics with its values of this moment.

    Args:
        common: Labels that all values have.
        values: By tuples of their other labels, which `label_names` names; those that are None are left out.
    """
    made = kind(f"tandem_{name}", text, labels=(*common, *label_names))
    for labels, value in values.items():
        if value is not None:
            made.add_metric((*common.values(), *labels), value)
    return made


class AtScrape(Collector, Generic[ValueT]):
    """Metrics of a value that belongs to the event loop, read when somebody asks. Construct it on the loop's thread."""

    def __init__(
        self, read: Callable[[], ValueT | None], metrics: Callable[[ValueT], Iterable[Metric]]
    ) -> None:
        self._read = read
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: at registration there may be nothing to read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; none when the event loop has ended or does not turn."""
        if (value := self.value()) is not None:
            yield from self._metrics(value)

    def value(self) -> ValueT | None:
        """The value, from any thread."""
        if threading.get_ident() == self._thread:
            return self._read()
        answer: concurrent.futures.Future[ValueT | None] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
            # Prometheus gives up after 10 s by default
            return answer.result(2.0)
        except (RuntimeError, TimeoutError):
            return None

    def _answer(self, answer: concurrent.futures.Future[ValueT | None]) -> None:
        try:
            answer.set_result(self._read())
        except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
            answer.set_exception(error)


def serve_metrics(options: TelemetryOptions, registry: CollectorRegistry) -> WSGIServer | None:
    """Serve the metrics of a registry at the Prometheus port; None where there is none."""
    host, port = options.prometheus_host, options.prometheus_port
    if port is None:
        return None
    if options.metric_names == "vllm":
        registry = registry_as_vllm(registry)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host}:{port}: {(error.strerror or str(error)).lower()}; choose another "
            "address with --prometheus-host and --prometheus-port"
        ) from error
    logger.info("metrics served", extra={"address": f"{host}:{server.server_port}"})
    return server


async def end_server(server: WSGIServer | None) -> None:
    """End what `serve_metrics` began."""
    if server is not None:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
