"""The parent's answers for all of its workers: it asks each, and makes one answer of theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from coordinator.admin.administration import MIN_INTERVAL_SECONDS
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.settings.live import LiveConfig, spelled
from coordinator.stats.speculation import add
from coordinator.workers.link import metrics_from, worker_address
from tandem.admin import (
    ConfigOption,
    CoordinatorState,
    Diagnosis,
    Finding,
    Load,
    Outcomes,
    RequestReport,
    Stats,
    Status,
    Throughput,
)
from tandem.admin_client import AdminClient
from tandem.errors import InvalidRequestError, NotFoundError, ServiceUnavailableError, TandemError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.rpc.channels import open_channel
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.types import SpeculationStats

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


def parsed(text: str) -> Families:
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


_WORST_FIRST = (
    ReplicaState.DOWN,
    ReplicaState.REFUSED,
    ReplicaState.INCOMPATIBLE,
    ReplicaState.CONNECTING,
    ReplicaState.DRAINING,
    ReplicaState.READY,
)


def merged_status(statuses: Sequence[Status], past: Stats | None, uptime_seconds: float) -> Status:
    """The status of all.

    Args:
        statuses: Of each, at least one.
        past: Counts of workers that have ended; None when none has.
        uptime_seconds: Of the whole.
    """
    first = statuses[0]
    replicas = merged_replicas(status.replicas for status in statuses)
    ended = [] if past is None else [past.speculation]
    return replace(
        first,
        state=_coordinator_state([status.state for status in statuses]),
        uptime_seconds=uptime_seconds,
        load=_load([status.load for status in statuses]),
        throughput=_throughput([status.throughput for status in statuses]),
        speculation=_speculation([*(status.speculation for status in statuses), *ended]),
        replicas=tuple(replicas),
        speculation_state=_state([status.speculation_state for status in statuses]),
        decisions=_decisions(status.decisions for status in statuses),
    )


def merged_stats(all_stats: Sequence[Stats], past: Stats | None, uptime_seconds: float) -> Stats:
    """The statistics of all; see `merged_status`."""
    counted = [*all_stats, *([] if past is None else [past])]
    rules = sorted({rule for stats in counted for rule in stats.by_rule})
    return replace(
        all_stats[0],
        uptime_seconds=uptime_seconds,
        load=_load([stats.load for stats in all_stats]),
        throughput=_throughput([stats.throughput for stats in all_stats]),
        outcomes=Outcomes(
            completed=sum(stats.outcomes.completed for stats in counted),
            failed=sum(stats.outcomes.failed for stats in counted),
            cancelled=sum(stats.outcomes.cancelled for stats in counted),
            aborted=sum(stats.outcomes.aborted for stats in counted),
        ),
        completion_tokens=sum(stats.completion_tokens for stats in counted),
        speculation=_speculation(stats.speculation for stats in counted),
        by_rule={
            rule: _speculation(stats.by_rule[rule] for stats in counted if rule in stats.by_rule)
            for rule in rules
        },
        speculation_state=_state([stats.speculation_state for stats in all_stats]),
        decisions=_decisions(stats.decisions for stats in all_stats),
    )


def merged_replicas(lists: Iterable[Iterable[ReplicaSnapshot]]) -> list[ReplicaSnapshot]:
    """Every replica once: targets first, then drafts, each by address."""
    by_name: dict[tuple[bool, str], list[ReplicaSnapshot]] = {}
    for shots in lists:
        for shot in shots:
            by_name.setdefault((shot.role is Role.DRAFT, shot.address), []).append(shot)
    return [_merged_replica(by_name[name]) for name in sorted(by_name)]


def merged_diagnosis(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """The worst finding of each check on each subject."""
    worst: dict[tuple[str, str], Finding] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.findings:
            name = finding.check, finding.subject
            if name not in worst or finding.severity > worst[name].severity:
                worst[name] = finding
    return replace(diagnoses[0], findings=tuple(worst.values()))


def _coordinator_state(states: Sequence[CoordinatorState]) -> CoordinatorState:
    if len(set(states)) == 1:
        return states[0]
    completes = any(state.completes for state in states)
    return CoordinatorState.DEGRADED if completes else CoordinatorState.UNAVAILABLE


def _merged_replica(shots: list[ReplicaSnapshot]) -> ReplicaSnapshot:
    worst = min(shots, key=lambda shot: _WORST_FIRST.index(shot.state))
    return replace(
        worst,
        open_sequences=sum(shot.open_sequences for shot in shots),
        round_trip_seconds=_mean_known(shot.round_trip_seconds for shot in shots),
        step_seconds=_mean_known(shot.step_seconds for shot in shots),
        figures=_speculation(shot.figures for shot in shots),
        model=next((shot.model for shot in shots if shot.model is not None), None),
    )


def _load(loads: Sequence[Load]) -> Load:
    return Load(sum(load.running for load in loads), sum(load.queued for load in loads))


def _throughput(rates: Sequence[Throughput]) -> Throughput:
    return Throughput(
        sum(rate.last_10_seconds for rate in rates), sum(rate.last_60_seconds for rate in rates)
    )


def _speculation(stats: Iterable[SpeculationStats]) -> SpeculationStats:
    total = SpeculationStats()
    for each in stats:
        add(total, each)
    return total


def _state(states: Sequence[SpeculationState]) -> SpeculationState:
    """State of a worker where a draft proposes, if there is one."""
    return next((state for state in states if state.is_on), states[0])


def _decisions(lists: Iterable[Iterable[SpeculationDecision]]) -> tuple[SpeculationDecision, ...]:
    """For each load the decision of the worker that has measured it for longest."""
    best: dict[object, SpeculationDecision] = {}
    for decision in (decision for decisions in lists for decision in decisions):
        name = (
            decision.target,
            decision.draft,
            decision.rule,
            decision.temperatures,
            decision.load,
            decision.ahead_outcomes is None,
        )
        known = best.get(name)
        if known is None or decision.measured_seconds > known.measured_seconds:
            best[name] = decision
    return tuple(sorted(best.values(), key=_order))


def _order(decision: SpeculationDecision) -> tuple[str, str, str, int]:
    return decision.target, decision.rule, decision.temperatures, decision.load


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_PATIENCE_SECONDS = 5.0
_COUNT_SECONDS = 5.0
"""Interval at which counts are read, so that those of a worker that dies are lost only since then."""

AnswerT = TypeVar("AnswerT")


class Worker:
    """A worker that takes requests, as its parent sees it."""

    def __init__(self, address: str) -> None:
        self.admin = AdminClient(address, timeout_seconds=_PATIENCE_SECONDS)
        self._channel = open_channel(address)
        self.stats: Stats | None = None
        """As last read."""
        self.families: Families = {}
        """Metrics as last read."""

    async def read_stats(self) -> Stats:
        """Its statistics now.

        Raises:
            TandemError: it does not answer.
        """
        self.stats = await self.admin.stats()
        return self.stats

    async def read_families(self) -> Families:
        """Its metrics now, or as last read where it does not answer."""
        with suppress(grpc.RpcError):
            text = await metrics_from(self._channel, _PATIENCE_SECONDS)
            self.families = parsed(text.decode())
        return self.families

    async def close(self) -> None:
        """Close the connections."""
        await self.admin.close()
        await self._channel.close()


class Hub:
    """Shows and steers all workers of a coordinator. See `Administrator`."""

    def __init__(self, settings: CoordinatorSettings, folder: str) -> None:
        """Begin without workers.

        Args:
            settings: Of the whole coordinator.
            folder: Holds the workers' sockets.
        """
        self._live_config = LiveConfig(settings)
        self._folder = folder
        self._started = time.monotonic()
        self._workers: dict[int, Worker] = {}
        self._past: Stats | None = None
        """Counts of workers that have ended."""
        self._past_families: Families = {}
        self.changes: dict[str, str] = {}
        """Options changed since the start, for workers that start later."""
        self.drained: set[str] = set()
        """Replicas that an operator drained, for workers that start later."""

    def joined(self, index: int) -> None:
        """A worker takes requests from now on."""
        self._workers[index] = Worker(worker_address(self._folder, index))

    async def left(self, index: int) -> None:
        """A worker has ended. What it counted stays in the sums."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        if worker.stats is not None:
            self._past = merged_stats([worker.stats], self._past, 0.0)
        self._past_families = merged([self._past_families, cumulative(worker.families)])
        await worker.close()

    async def close(self) -> None:
        """Close the connections."""
        for index in list(self._workers):
            await self.left(index)

    async def keep_counts(self) -> None:
        """Read all counts now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            if self._workers:
                with suppress(TandemError):
                    await asyncio.gather(self._each(Worker.read_stats), self.families())

    async def status(self) -> Status:
        """How the coordinator does."""
        statuses = await self._each(lambda worker: worker.admin.status())
        return merged_status(statuses, self._past, self._uptime)

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        return merged_replicas(await self._each(lambda worker: worker.admin.replicas()))

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        """Let no worker send new sequences to a replica."""
        await self._each(lambda worker: worker.admin.drain(address, allow_last_target=allow_last_target))
        self.drained.add(address)
        return await self._replica(address)

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        """Let all workers send new sequences to a replica again."""
        await self._each(lambda worker: worker.admin.resume(address))
        self.drained.discard(address)
        return await self._replica(address)

    async def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""
        lists = await self._each(lambda worker: worker.admin.requests())
        return sorted((report for reports in lists for report in reports), key=_age, reverse=True)

    async def request(self, request_id: str) -> RequestReport:
        """The request whose id begins like this."""
        return found_request(await self.requests(), request_id)

    async def abort(self, request_id: str, *, reason: str, by: str) -> RequestReport:
        """End the request whose id begins like this, on the worker that runs it."""
        whole_id = (await self.request(request_id)).request_id
        [report, *_] = await self._each(lambda worker: worker.admin.abort(whole_id, reason))
        return report

    async def stats(self) -> Stats:
        """Counts since the start, those of workers that have ended included."""
        return merged_stats(await self._each(Worker.read_stats), self._past, self._uptime)

    async def watch(self, interval_seconds: float) -> AsyncGenerator[Stats]:
        """Statistics at a fixed interval.

        Raises:
            InvalidRequestError: the interval is too short.
        """
        if not interval_seconds >= MIN_INTERVAL_SECONDS:
            raise InvalidRequestError(
                f"interval_seconds is {interval_seconds:g}; it must be at least {MIN_INTERVAL_SECONDS:g}"
            )
        while True:
            yield await self.stats()
            await asyncio.sleep(interval_seconds)

    async def config(self) -> list[ConfigOption]:
        """Every option with its value and its origin. Bounds are those of the whole."""
        return self._live_config.options()

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str], *, by: str
    ) -> list[ConfigOption]:
        """Change options for new requests, on all workers and on those that start later."""
        if not values and not reset:
            raise InvalidRequestError("no option is named; name at least one to set or to reset")
        options = self._live_config.change(values, reset, by)
        for name in map(spelled, reset):
            self.changes.pop(name, None)
        self.changes |= {spelled(name): value for name, value in values.items()}
        await self._each(lambda worker: worker.admin.update_config(values, reset))
        return options

    async def diagnose(self) -> Diagnosis:
        """The worst finding of each check."""
        return merged_diagnosis(await self._each(lambda worker: worker.admin.diagnose()))

    async def families(self) -> Families:
        """The metrics of all workers, those of workers that have ended included."""
        workers = list(self._workers.values())
        read = await asyncio.gather(*(worker.read_families() for worker in workers))
        count = Family(
            "Worker processes that take requests.",
            "gauge",
            {("tandem_coordinator_workers", ()): float(len(workers))},
        )
        return merged([*read, self._past_families, {"tandem_coordinator_workers": count}])

    async def metrics_text(self) -> bytes:
        """The same in Prometheus's text form."""
        return to_text(await self.families())

    @property
    def _uptime(self) -> float:
        return time.monotonic() - self._started

    async def _replica(self, address: str) -> ReplicaSnapshot:
        for replica in await self.replicas():
            if replica.address == address:
                return replica
        raise NotFoundError(f"there is no replica {address!r}")

    async def _each(self, ask: Callable[[Worker], Awaitable[AnswerT]]) -> Sequence[AnswerT]:
        """The answers of all workers that give one, at least one.

        Raises:
            TandemError: none does; the first worker's error.
        """
        workers = list(self._workers.values())
        results = await asyncio.gather(*map(ask, workers), return_exceptions=True)
        answers: list[AnswerT] = []
        errors: list[TandemError] = []
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, TandemError):
                # The address means nothing outside.
                plain = str(result).removeprefix(f"coordinator {worker.admin.address}: ")
                errors.append(type(result)(plain))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        if not answers:
            raise errors[0] if errors else ServiceUnavailableError("no worker takes requests at the moment")
        return answers


def found_request(reports: Sequence[RequestReport], beginning: str) -> RequestReport:
    """The request whose id begins like this.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: there are several, or nothing was given.
    """
    if not beginning:
        raise InvalidRequestError("request_id is empty; it must be an id, or the beginning of one")
    found = [report for report in reports if report.request_id.startswith(beginning)]
    exact = [report for report in found if report.request_id == beginning]
    if not found:
        raise NotFoundError(f"no request that runs has an id that begins with {beginning}")
    if len(found) > 1 and not exact:
        raise InvalidRequestError(
            f"{len(found)} requests that run have an id that begins with {beginning}; give more of it"
        )
    return (exact or found)[0]


def _age(report: RequestReport) -> float:
    return report.age_seconds
