"""Joins the answers of several coordinators that share replicas: counts are added, states are the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from coordinator.stats.speculation import add
from tandem.admin import CoordinatorState, Diagnosis, Finding, Load, Outcomes, Stats, Status, Throughput
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.types import SpeculationStats

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
        round_trip_seconds=_mean(shot.round_trip_seconds for shot in shots),
        step_seconds=_mean(shot.step_seconds for shot in shots),
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


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
