"""Metrics of several processes as those of one: series with the same name and labels become one series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]
"""Values by name and labels."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_MEANS = (
    "tandem_spec_decode_acceptance_rate",
    "tandem_spec_decode_avg_acceptance_length",
    "tandem_spec_decode_acceptance_rate_per_position",
    "tandem_spec_decode_conditional_acceptance_rate_per_position",
    "tandem_spec_decode_predicted_gain",
    "tandem_replica_round_trip_seconds",
    "tandem_replica_step_seconds",
)
_JOINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(_MEANS, _mean),
    "tandem_spec_decode_proposal_length": max,
    # Every worker sees every replica, and counts it.
    "tandem_replicas": max,
    "tandem_replica_ready": min,
    "tandem_build_info": max,
    "process_start_time_seconds": min,
}
"""Gauges that are not added. Counters, histograms and all other gauges are."""


@dataclass(slots=True)
class Family:
    """A metric with its series."""

    text: str
    kind: str
    """As Prometheus's text form names it: counter, gauge, histogram."""
    series: Series = field(default_factory=dict)

    @property
    def is_cumulative(self) -> bool:
        """True if its values only grow."""
        return self.kind in ("counter", "histogram", "summary")


Families = dict[str, Family]
"""Metrics by name."""


def read(text: str) -> Families:
    """The metrics of a process from Prometheus's text form."""
    families: Families = {}
    for metric in text_string_to_metric_families(text):
        series: Series = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in metric.samples
        }
        families[metric.name] = Family(metric.documentation, metric.type, series)
    return families


def merged(processes: Iterable[Families]) -> Families:
    """The metrics of all: added, except for gauges that say the same in each process."""
    values: dict[str, dict[tuple[str, Labels], list[float]]] = {}
    kinds: dict[str, Family] = {}
    for families in processes:
        for name, family in families.items():
            kinds.setdefault(name, family)
            own = values.setdefault(name, {})
            for series, value in family.series.items():
                own.setdefault(series, []).append(value)
    return {
        name: Family(
            kinds[name].text,
            kinds[name].kind,
            {series: _JOINED.get(name, sum)(each) for series, each in own.items()},
        )
        for name, own in values.items()
    }


def cumulative(families: Families) -> Families:
    """Those that only grow: they outlive their process, so that a sum over processes never falls."""
    return {name: family for name, family in families.items() if family.is_cumulative}


def to_text(families: Families) -> bytes:
    """The metrics in Prometheus's text form."""
    registry = CollectorRegistry()
    registry.register(Given(lambda: families))
    return generate_latest(registry)


class Given(Collector):
    """Collects metrics that someone else has read."""

    def __init__(self, families: Callable[[], Families]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: what there is shows when it is read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        for name, family in self._families().items():
            metric = Metric(name, family.text, family.kind)
            for (sample, labels), value in family.series.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
