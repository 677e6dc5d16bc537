"""vLLM's names of metrics, for dashboards that exist, and OpenTelemetry's names and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from tandem.telemetry.settings import TelemetryOptions

_VLLM_HAS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens",
        "generation_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "kv_cache_usage_perc",
        "num_preemptions",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }
)
_VLLM_CALLS = {"requests": "request_success", "prefill_seconds": "request_prefill_time_seconds"}
"""vLLM 0.32 has these metrics, those above under the same name (vllm/v1/metrics/loggers.py)."""


def as_vllm(families: Iterable[Metric]) -> Iterator[Metric]:
    """Metrics under vLLM's names, where it has them. It counts positions from 0, and only requests that ended well."""
    for family in families:
        bare = family.name.removeprefix("tandem_")
        name = _VLLM_CALLS.get(bare, bare if bare in _VLLM_HAS else "")
        if not name or bare == family.name:
            yield family
            continue
        renamed = Metric(f"vllm:{name}", family.documentation, family.type)
        for sample in family.samples:
            labels = dict(sample.labels)
            if bare == "requests":
                labels["finished_reason"] = labels.pop("outcome")
                if labels["finished_reason"] not in ("stop", "length"):
                    continue
            if (position := labels.get("position", "")).isdecimal():
                labels["position"] = str(int(position) - 1)
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(sample._replace(name=f"vllm:{name}{suffix}", labels=labels))
        yield renamed


def named(registry: CollectorRegistry, options: TelemetryOptions) -> CollectorRegistry:
    """The registry under the names that the options ask for."""
    return registry_of(lambda: as_vllm(registry.collect())) if options.metric_names == "vllm" else registry


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


# ---- OpenTelemetry

_CONVENTIONS: Mapping[str, str] = {
    "tandem_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "tandem_request_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "tandem_e2e_request_latency_seconds": "gen_ai.server.request.duration",
}
_UNITS = {"seconds": "s", "bytes": "By", "pos": "{token}", "length": "{token}"}
"""UCUM's units, by the last word of a name. Other words in the plural count what they name."""


def unit_of(name: str) -> str:
    """The unit of one of our metrics, as OTLP spells it; empty for a number without one."""
    word = name.removesuffix("_running").removesuffix("_waiting").rpartition("_")[2]
    return _UNITS.get(word) or (f"{{{word[:-1]}}}" if word.endswith("s") else "")


def by_conventions(families: Iterable[Metric]) -> Iterator[Metric]:
    """The metrics, and under OpenTelemetry's names those that it has a convention for."""
    for family in families:
        yield family
        if (name := _CONVENTIONS.get(family.name)) is None:
            continue
        # The name is no name for Prometheus, which would refuse it.
        named = Metric(family.name, family.documentation, family.type, "seconds")
        named.name = name
        for sample in family.samples:
            others = {key: value for key, value in sample.labels.items() if key != "model_name"}
            labels = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "tandem",
                "gen_ai.request.model": sample.labels["model_name"],
                **others,
            }
            named.samples.append(sample._replace(labels=labels))
        yield named
