"""The parent's answers for all of its workers: it asks each, and makes one answer of theirs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from itertools import chain
from statistics import fmean
from typing import TypeVar

from prometheus_client import Metric, generate_latest

from coordinator.admin.administration import Administrator
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.settings.live import LiveConfig
from coordinator.stats.speculation import summed
from coordinator.workers.link import Peer
from tandem.admin import (
    ConfigOption,
    CoordinatorState,
    Load,
    Outcomes,
    RequestReport,
    Stats,
    Status,
    Throughput,
)
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role, replica_at
from tandem.speculation_state import SpeculationDecision
from tandem.telemetry.names import registry_of

_JOINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "tandem_spec_decode_acceptance_rate": fmean,
    "tandem_spec_decode_avg_acceptance_length": fmean,
    "tandem_spec_decode_acceptance_rate_per_position": fmean,
    "tandem_spec_decode_conditional_acceptance_rate_per_position": fmean,
    "tandem_spec_decode_predicted_gain": fmean,
    "tandem_replica_round_trip_seconds": fmean,
    "tandem_replica_step_seconds": fmean,
    "tandem_spec_decode_proposal_length": max,
    # Every worker sees every replica, and counts it.
    "tandem_replicas": max,
    "tandem_replica_ready": min,
    "tandem_build_info": max,
    "process_start_time_seconds": min,
}
"""Gauges that are not added. Counters, histograms and all other gauges are."""

_OF_STATS = ("uptime_seconds", "load", "throughput", "speculation", "speculation_state", "decisions")
"""Fields that a status has in common with statistics."""

AnswerT = TypeVar("AnswerT")
NumbersT = TypeVar("NumbersT", Load, Outcomes, Throughput)


class Hub(Administrator):
    """Shows and steers all workers of a coordinator."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        super().__init__(LiveConfig(settings))
        self._workers: dict[int, Peer] = {}
        self._past: Stats | None = None
        """Counts of workers that have ended."""
        self._past_metrics: list[Metric] = []
        self.drained: set[str] = set()
        """Replicas that an operator drained, for workers that start later."""

    def joined(self, index: int, address: str) -> None:
        """A worker takes requests from now on, and answers at this address."""
        # Half of the time that `tandem admin` waits for all of them
        self._workers[index] = Peer(address, timeout_seconds=5.0)

    async def left(self, index: int) -> None:
        """A worker has ended, if it had joined. What it counted stays in the sums."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        if worker.last_stats is not None:
            self._past = merged_stats([worker.last_stats], self._past)
        counts = [each for each in worker.last_metrics if each.type in ("counter", "histogram", "summary")]
        self._past_metrics = merged_metrics([self._past_metrics, counts])
        await worker.close()

    async def close(self) -> None:
        """Close the connections."""
        for index in list(self._workers):
            await self.left(index)

    async def keep_counts(self) -> None:
        """Read all counts now and then, until it is cancelled."""
        while True:
            # Of a worker that dies, only what it counted since the last reading is lost
            await asyncio.sleep(5.0)
            if self._workers:
                with suppress(TandemError):
                    await asyncio.gather(self.stats(), self.metrics())

    async def status(self) -> Status:
        statuses, stats = await asyncio.gather(self._each(Peer.status), self.stats())
        return merged_status(statuses, stats)

    async def replicas(self) -> list[ReplicaSnapshot]:
        return merged_replicas(await self._each(Peer.replicas))

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        await self._each(lambda worker: worker.drain(address, allow_last_target=allow_last_target))
        self.drained.add(address)
        return replica_at(await self.replicas(), address)

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        await self._each(lambda worker: worker.resume(address))
        self.drained.discard(address)
        return replica_at(await self.replicas(), address)

    async def requests(self) -> list[RequestReport]:
        lists = await self._each(Peer.requests)
        return sorted((report for reports in lists for report in reports), key=lambda each: -each.age_seconds)

    async def abort(self, request_id: str, *, reason: str, by: str) -> RequestReport:
        whole_id = (await self.request(request_id)).request_id
        [report, *_] = await self._each(lambda worker: worker.abort(whole_id, reason))
        return report

    async def stats(self) -> Stats:
        """See `Administrator`. Counts of workers that have ended are included."""
        stats = merged_stats(await self._each(Peer.stats), self._past)
        return replace(stats, uptime_seconds=self._uptime)

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str], *, by: str
    ) -> list[ConfigOption]:
        """Change options for new requests, on all workers and on those that start later."""
        options = await super().update_config(values, reset, by=by)
        await self._each(lambda worker: worker.update_config(values, reset))
        return options

    async def metrics(self) -> list[Metric]:
        """The metrics of all workers, those of workers that have ended included."""
        workers = list(self._workers.values())
        read = await asyncio.gather(*(worker.metrics() for worker in workers))
        count = Metric("tandem_coordinator_workers", "Worker processes that take requests.", "gauge")
        count.add_sample(count.name, {}, float(len(workers)))
        return merged_metrics([*read, self._past_metrics, [count]])

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        found = await self.metrics()
        return generate_latest(registry_of(lambda: found))

    async def _each(self, ask: Callable[[Peer], Awaitable[AnswerT]]) -> Sequence[AnswerT]:
        """The answers of all workers that give one, at least one."""
        workers = list(self._workers.values())
        results = await asyncio.gather(*map(ask, workers), return_exceptions=True)
        answers: list[AnswerT] = []
        refusal: TandemError = ServiceUnavailableError("no worker takes requests at the moment")
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, TandemError):
                # The address means nothing outside.
                refusal = type(result)(str(result).removeprefix(f"coordinator {worker.address}: "))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        if not answers:
            raise refusal
        return answers


def merged_status(statuses: Sequence[Status], stats: Stats) -> Status:
    """The status of all workers; `stats` are their merged statistics."""
    first, states = statuses[0], {status.state for status in statuses}
    completes = any(each.completes for each in states)
    mixed = CoordinatorState.DEGRADED if completes else CoordinatorState.UNAVAILABLE
    return replace(
        first,
        state=mixed if len(states) > 1 else first.state,
        replicas=tuple(merged_replicas(status.replicas for status in statuses)),
        **{name: getattr(stats, name) for name in _OF_STATS},
    )


def merged_stats(running: Sequence[Stats], past: Stats | None = None) -> Stats:
    """The statistics of all workers.

    Args:
        running: Of each that takes requests, at least one.
        past: Of those that have ended: their counts are added, their load is not.
    """
    counted = [*running, *([] if past is None else [past])]
    rules = sorted({rule for stats in counted for rule in stats.by_rule})
    return replace(
        running[0],
        load=_sums([stats.load for stats in running]),
        throughput=_sums([stats.throughput for stats in running]),
        outcomes=_sums([stats.outcomes for stats in counted]),
        completion_tokens=sum(stats.completion_tokens for stats in counted),
        speculation=summed(stats.speculation for stats in counted),
        by_rule={
            rule: summed(stats.by_rule[rule] for stats in counted if rule in stats.by_rule) for rule in rules
        },
        # That of a worker where a draft proposes, if there is one.
        speculation_state=max((stats.speculation_state for stats in running), key=lambda state: state.is_on),
        decisions=_decisions(decision for stats in running for decision in stats.decisions),
    )


def merged_replicas(lists: Iterable[Iterable[ReplicaSnapshot]]) -> list[ReplicaSnapshot]:
    """Every replica once: targets first, then drafts, each by address."""
    by_name = defaultdict(list)
    for shot in chain.from_iterable(lists):
        by_name[shot.role is Role.DRAFT, shot.address].append(shot)
    return [_merged_replica(by_name[name]) for name in sorted(by_name)]


def merged_metrics(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """The metrics of several processes as those of one.

    Series with the same name and labels are added, except for gauges that say the same in each process.
    """
    merged: dict[str, Metric] = {}
    values = defaultdict(list)
    for metric in chain.from_iterable(processes):
        merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        for sample in metric.samples:
            values[metric.name, sample.name, tuple(sorted(sample.labels.items()))].append(sample.value)
    for (name, sample_name, labels), each in values.items():
        merged[name].add_sample(sample_name, dict(labels), _JOINED.get(name, sum)(each))
    return [*merged.values()]


def _sums(items: Sequence[NumbersT]) -> NumbersT:
    return type(items[0])(*map(sum, zip(*map(astuple, items), strict=True)))


def _decisions(decisions: Iterable[SpeculationDecision]) -> tuple[SpeculationDecision, ...]:
    """For each load the decision of the worker that has measured it for longest."""
    ordered = sorted(decisions, key=lambda each: each.measured_seconds)
    best = {(each.target, each.rule, each.temperatures, each.load, each.draft): each for each in ordered}
    return tuple(best[name] for name in sorted(best))


def _merged_replica(shots: list[ReplicaSnapshot]) -> ReplicaSnapshot:
    worst = max(shots, key=lambda shot: [*ReplicaState].index(shot.state))
    return replace(
        worst,
        open_sequences=sum(shot.open_sequences for shot in shots),
        round_trip_seconds=_mean_known(shot.round_trip_seconds for shot in shots),
        step_seconds=_mean_known(shot.step_seconds for shot in shots),
        figures=summed(shot.figures for shot in shots),
        model=next((shot.model for shot in shots if shot.model is not None), None),
    )


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
