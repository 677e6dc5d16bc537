"""Parts of metrics: instruments, histograms that cost little, values read at scrape time, and vLLM's names."""

from __future__ import annotations

import asyncio
import logging
import threading
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tandem.errors import ConfigurationError
from tandem.model.types import TOKEN_BOUNDS
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

# Each bound is about twice the one before, over the range that is seen.
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""A part of a round, from a short computation to a lost peer."""
LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Seconds that a client waits."""
TOKENS = TOKEN_BOUNDS
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


@dataclass(eq=False)
class Histogram(Collector):
    """A histogram whose values come from one thread, several for each round.

    A value costs 0.14 us. prometheus_client's histogram takes a lock or two for it (0.7 us); OpenTelemetry's takes
    5.9 us, which cost a coordinator with 64 streams a quarter of its tokens per second.
    """

    name: str
    text: str
    label_names: Sequence[str]
    bounds: Sequence[float]
    _series: dict[tuple[str, ...], Series] = field(default_factory=dict)

    def labels(self, *values: str) -> Series:
        return self._series.setdefault(values, Series(self.bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.label_names)
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        for values, series in [*self._series.items()]:
            below = accumulate([*series.counts])
            family.add_metric(values, [*zip(names, below, strict=True)], series.total)
        yield family


@dataclass(frozen=True, slots=True)
class _Declared:
    text: str
    bounds: Sequence[float] | None
    label: Mapping[str, Sequence[str]]


def counter(text: str, **label: Sequence[str]) -> Any:
    """A counter of a class of `Metrics`; with a label of its own, one for each of its values."""
    return _Declared(text, None, label)


def histogram(text: str, bounds: Sequence[float] = STEP_SECONDS, **label: Sequence[str]) -> Any:
    """A histogram of such a class, likewise; with two labels or more, a function from their values to the series."""
    return _Declared(text, bounds, label)


class Metrics:
    """Metrics that are counted when something happens: those that a class declares, named like their attributes, with
    labels in common. All series that are declared exist from the start: a rate needs a first value."""

    def __init__(self, registry: CollectorRegistry, **common: str) -> None:
        for name, each in vars(type(self)).items():
            if not isinstance(each, _Declared):
                continue
            arguments = f"tandem_{name}", each.text, (*common, *each.label)
            whole: Any = (
                Counter(*arguments, registry=None)
                if each.bounds is None
                else Histogram(*arguments, each.bounds)
            )
            registry.register(whole)
            of_model = partial(whole.labels, *common.values())
            own = {values: of_model(*values) for values in product(*each.label.values())}
            if not each.label:
                setattr(self, name, own[()])
            elif len(each.label) == 1:
                setattr(self, name, {value: one for (value,), one in own.items()})
            else:
                setattr(self, name, of_model)


def family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    common: Mapping[str, str],
    name: str,
    text: str,
    values: Mapping[Any, float | None] | float,
    *label_names: str,
) -> Metric:
    """One of our metrics with its value of this moment, or its values by tuples of the labels that it has besides the
    common ones. Values that are None are left out."""
    made = kind(f"tandem_{name}", text, labels=(*common, *label_names))
    for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
        if value is not None:
            made.add_metric((*common.values(), *labels), value)
    return made


def on_loop(
    read: Callable[[], ValueT], refresh: Callable[[], Awaitable[None]] | None = None
) -> Callable[[], ValueT | None]:
    """A function that calls `read` on this event loop, from any thread; None where the loop has ended or is held up.

    Other threads have `refresh` awaited before. On the loop's own thread nothing can be: it calls `read` alone.
    """
    loop = asyncio.get_running_loop()
    own_thread = threading.get_ident()

    async def on_this_loop() -> ValueT:
        if refresh is not None:
            await refresh()
        return read()

    def from_any_thread() -> ValueT | None:
        if threading.get_ident() == own_thread:
            return read()
        if loop.is_closed():
            return None
        try:
            # Prometheus gives up after 10 s by default
            return asyncio.run_coroutine_threadsafe(on_this_loop(), loop).result(2.0)
        except (RuntimeError, TimeoutError):
            return None

    return from_any_thread


class Read(Collector):
    """Metrics that are read whenever their registry is. Without `describe`, the registry does not read them before."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def registry_of(read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry of metrics that are read whenever it is."""
    registry = CollectorRegistry()
    registry.register(Read(read))
    return registry


# ---- served to Prometheus


_VLLM_NAMES = {
    "tandem_requests": "vllm:request_success",
    "tandem_prefill_seconds": "vllm:request_prefill_time_seconds",
    "tandem_engine_batch_tokens": "vllm:iteration_tokens_total",
    "tandem_request_preemptions": "vllm:num_preemptions",
    **{f"tandem_{name}": f"vllm:{name}" for name in (
        "num_requests_running", "num_requests_waiting", "prompt_tokens", "generation_tokens",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "kv_cache_usage_perc", "num_preemptions", "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
        "num_requests_waiting_by_reason", "prompt_tokens_cached", "prompt_tokens_by_source", "prefix_cache_queries",
        "prefix_cache_hits", "request_inference_time_seconds", "request_decode_time_seconds", "request_params_n",
        "request_params_max_tokens", "request_max_num_generation_tokens", "request_num_preemptions",
        "request_prefill_kv_computed_tokens", "admission_rejections",
    )},
}  # fmt: skip
"""The metrics that vLLM 0.33 has (vllm/v1/metrics/loggers.py)."""
_VLLM_ENGINE_NAMES = {
    "tandem_replica_engine_batch_tokens": "vllm:iteration_tokens_total",
    **{f"tandem_replica_{name}": f"vllm:{name}" for name in (
        "kv_cache_usage_perc", "cache_config_info", "prefix_cache_queries", "prefix_cache_hits",
    )},
}  # fmt: skip
"""Those of its engines: each target is one."""
_VLLM_REASONS = {"max_queued_requests": "max_num_queued_reqs"}
"""Its names of the limits on requests."""


def as_vllm(families: Iterable[Metric]) -> Iterator[Metric]:
    """Metrics under vLLM's names, where it has them. It counts positions from 0, and only requests that ended well."""
    for family in families:
        if family.name in _VLLM_ENGINE_NAMES:
            yield from _engines_as_vllm(family)
            continue
        if (name := _VLLM_NAMES.get(family.name)) is None:
            yield family
            continue
        renamed = Metric(name, family.documentation, family.type)
        for sample in _without(family.samples, {"operation", "error_type"}):
            labels = dict(sample.labels)
            if family.name == "tandem_requests":
                labels["finished_reason"] = labels.pop("outcome")
                if labels["finished_reason"] not in ("stop", "length"):
                    continue
            if family.name == "tandem_admission_rejections":
                labels["reason"] = _VLLM_REASONS.get(labels["reason"], labels["reason"])
            if (position := labels.get("position", "")).isdecimal():
                labels["position"] = str(int(position) - 1)
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(sample._replace(name=f"{name}{suffix}", labels=labels))
        yield renamed


def _engines_as_vllm(family: Metric) -> Iterator[Metric]:
    """A metric of all replicas: the targets' under vLLM's name, the drafts' under its own."""
    name = _VLLM_ENGINE_NAMES[family.name]
    of_targets = Metric(name, family.documentation, family.type)
    of_drafts = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        labels = dict(sample.labels)
        if labels.pop("role") != "target":
            of_drafts.samples.append(sample)
            continue
        del labels["address"]
        suffix = sample.name.removeprefix(family.name)
        of_targets.samples.append(sample._replace(name=f"{name}{suffix}", labels=labels))
    yield of_targets
    if of_drafts.samples:
        yield of_drafts


def _without(samples: Sequence[Sample], left_out: Set[str]) -> Iterable[Sample]:
    """Samples without some of their labels: those that differ in nothing else are added up."""
    if not any(left_out & sample.labels.keys() for sample in samples):
        return samples
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name not in left_out}
        key = sample.name, tuple(labels.items())
        before = found[key].value if key in found else 0.0
        found[key] = sample._replace(labels=labels, value=before + sample.value)
    return found.values()


def name_metrics(registry: CollectorRegistry, options: TelemetryOptions) -> CollectorRegistry:
    """The registry under the names that the options ask for."""
    return registry_of(lambda: as_vllm(registry.collect())) if options.metric_names == "vllm" else registry


def serve_metrics(options: TelemetryOptions, registry: CollectorRegistry) -> WSGIServer | None:
    """Serve the metrics of a registry at the Prometheus port; None where there is none."""
    host = options.prometheus_host
    port = options.prometheus_port
    if port is None:
        return None
    try:
        server, _ = start_http_server(port, host, name_metrics(registry, options))
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
