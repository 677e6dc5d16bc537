"""What the coordinator looks like at the moment when someone asks: load, replicas, acceptance of the last minute."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.figures import (
    acceptance_rate,
    accepted_per_verification,
    add,
    conditional_rates,
    cumulative_rates,
)
from coordinator.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.telemetry.on_loop import OnLoop
from tandem.types import SpeculationFigures

_WINDOW_SECONDS = 60.0
_PART_SECONDS = 5.0
_MOST_REPLICAS = 128
"""Of each role that are told one by one. All are in the counts."""


class RecentFigures:
    """What speculation did in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: deque[tuple[float, SpeculationFigures]] = deque()

    def add(self, figures: SpeculationFigures) -> None:
        """Count what was done just now."""
        now = self._clock()
        if not self._parts or now - self._parts[-1][0] >= _PART_SECONDS:
            self._parts.append((now, SpeculationFigures()))
            self._forget(now)
        add(self._parts[-1][1], figures)

    def total(self) -> SpeculationFigures:
        """All of the last minute."""
        self._forget(self._clock())
        total = SpeculationFigures()
        for _, figures in self._parts:
            add(total, figures)
        return total

    def _forget(self, now: float) -> None:
        while self._parts and now - self._parts[0][0] >= _WINDOW_SECONDS:
            self._parts.popleft()


@dataclass(frozen=True, slots=True)
class State:
    """One moment."""

    model_name: str
    running: int
    queued: int
    replicas: list[ReplicaSnapshot]
    recent: SpeculationFigures


class StateCollector(Collector):
    """Makes metrics of a `State`, which is read on the event loop."""

    def __init__(self, read: Callable[[], State]) -> None:
        self._read = OnLoop(read)

    def describe(self) -> Iterator[Metric]:
        """Nothing: it is registered before there is anything to read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; none when the event loop has ended."""
        state = self._read()
        if state is not None:
            yield from _load(state)
            yield from _recent(state)
            yield from _replica_states(state)
            yield from _replica_details(state)


def _load(state: State) -> Iterator[Metric]:
    for name, text, value in (
        ("num_requests_running", "Requests that have a place.", state.running),
        ("num_requests_waiting", "Requests that wait for a place.", state.queued),
    ):
        yield _gauge(state, name, text, value)


def _recent(state: State) -> Iterator[Metric]:
    recent = state.recent
    if not recent.drafted:
        return
    yield _gauge(state, "spec_decode_acceptance_rate", "Share of the proposed tokens that were accepted, last "
                 "minute.", acceptance_rate(recent))  # fmt: skip
    yield _gauge(state, "spec_decode_avg_acceptance_length", "Accepted tokens by verification, last minute (MAX).",
                 accepted_per_verification(recent))  # fmt: skip
    for name, rates in (
        ("acceptance_rate_per_position", cumulative_rates(recent)),
        ("conditional_acceptance_rate_per_position", conditional_rates(recent)),
    ):
        family = GaugeMetricFamily(
            f"tandem_spec_decode_{name}",
            "Acceptance rate at a position, last minute.",
            labels=("model_name", "position"),
        )
        for position, rate in enumerate(rates):
            family.add_metric((state.model_name, str(position)), rate)
        yield family


def _gauge(state: State, name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"tandem_{name}", text, labels=("model_name",))
    family.add_metric((state.model_name,), value)
    return family


def _replica_states(state: State) -> Iterator[Metric]:
    counts = Counter((shot.role, shot.state) for shot in state.replicas)
    family = GaugeMetricFamily(
        "tandem_replicas", "Replicas by state.", labels=("model_name", "role", "state")
    )
    for role in Role:
        for replica_state in ReplicaState:
            labels = (state.model_name, role.value, replica_state.value)
            family.add_metric(labels, counts[role, replica_state])
    yield family


def _replica_details(state: State) -> Iterator[Metric]:
    shots = [shot for role in Role for shot in _first(state.replicas, role)]
    labels = ("model_name", "role", "address")
    gauges: tuple[tuple[str, str, Callable[[ReplicaSnapshot], float | None]], ...] = (
        ("ready", "Whether new sequences go to the replica.", lambda shot: shot.state is ReplicaState.READY),
        ("open_sequences", "Sequences on the replica.", lambda shot: shot.open_sequences),
        ("round_trip_seconds", "Time to answer a health check.", lambda shot: shot.round_trip_seconds),
        ("step_seconds", "Time to answer a step.", lambda shot: shot.step_seconds),
    )
    counters: tuple[tuple[str, str, Callable[[ReplicaSnapshot], float]], ...] = (
        ("draft_tokens", "Tokens proposed, on the replica.", lambda shot: shot.figures.drafted),
        ("accepted_tokens", "Of these, those that were accepted.", lambda shot: shot.figures.accepted),
    )
    for name, text, value_of in gauges:
        gauge = GaugeMetricFamily(f"tandem_replica_{name}", text, labels=labels)
        for shot in shots:
            if (value := value_of(shot)) is not None:
                gauge.add_metric((state.model_name, shot.role.value, shot.address), value)
        yield gauge
    for name, text, count_of in counters:
        counter = CounterMetricFamily(f"tandem_replica_{name}", text, labels=labels)
        for shot in shots:
            counter.add_metric((state.model_name, shot.role.value, shot.address), count_of(shot))
        yield counter


def _first(replicas: list[ReplicaSnapshot], role: Role) -> list[ReplicaSnapshot]:
    return [shot for shot in replicas if shot.role is role][:_MOST_REPLICAS]
