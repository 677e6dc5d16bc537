"""The coordinator's state at scrape time: load, replicas, acceptance of the last minute."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
)
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import SpeculationDecision
from tandem.telemetry.on_loop import OnLoop
from tandem.types import SpeculationStats

_WINDOW_SECONDS = 60.0
_PART_SECONDS = 5.0
_MAX_DECISIONS = 256
"""Maximum loads, rules and temperature ranges with metrics of their own."""
_MAX_REPLICAS = 128
"""Maximum replicas of each role with metrics of their own. The counts include all."""


class RecentStats:
    """Speculation statistics of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: deque[tuple[float, SpeculationStats]] = deque()

    def add(self, stats: SpeculationStats) -> None:
        """Count these rounds, which ended just now."""
        now = self._clock()
        if not self._parts or now - self._parts[-1][0] >= _PART_SECONDS:
            self._parts.append((now, SpeculationStats()))
            self._forget(now)
        add(self._parts[-1][1], stats)

    def total(self) -> SpeculationStats:
        """All of the last minute."""
        self._forget(self._clock())
        total = SpeculationStats()
        for _, stats in self._parts:
            add(total, stats)
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
    recent: SpeculationStats
    decisions: Sequence[SpeculationDecision] = ()
    """How much is proposed at each load that there was."""


class StateCollector(Collector):
    """Makes metrics of a `State`, which is read on the event loop."""

    def __init__(self, read: Callable[[], State]) -> None:
        self._read = OnLoop(read)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the collector is registered before there is anything to read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; none when the event loop has ended."""
        state = self._read()
        if state is not None:
            yield from _load(state)
            yield from _recent(state)
            yield from _decisions(state)
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
                 acceptance_length(recent))  # fmt: skip
    for name, rates in (
        ("acceptance_rate_per_position", cumulative_rates(recent)),
        ("conditional_acceptance_rate_per_position", conditional_rates(recent)),
    ):
        family = GaugeMetricFamily(
            f"tandem_spec_decode_{name}",
            "Acceptance rate at a position, last minute.",
            labels=("model_name", "position"),
        )
        for position, rate in enumerate(rates, start=1):
            family.add_metric((state.model_name, str(position)), rate)
        yield family


def _decisions(state: State) -> Iterator[Metric]:
    labels = ("model_name", "target", "rule", "temperatures", "sequences", "ahead")
    tokens = GaugeMetricFamily(
        "tandem_spec_decode_proposal_length", "Tokens proposed at a load (K); 0: target alone.", labels=labels
    )
    gain = GaugeMetricFamily(
        "tandem_spec_decode_predicted_gain",
        "Predicted tokens per second with the best K above 0, over those of the target alone.",
        labels=labels,
    )
    predicted = CounterMetricFamily(
        "tandem_round_predicted_seconds", "Predicted time of rounds.", labels=labels
    )
    measured = CounterMetricFamily(
        "tandem_round_measured_seconds", "Measured time of the same rounds.", labels=labels
    )
    for decision in state.decisions[:_MAX_DECISIONS]:
        values = (
            state.model_name,
            decision.target,
            decision.rule,
            decision.temperatures,
            str(decision.load),
            "off" if decision.ahead_outcomes is None else "on",
        )
        tokens.add_metric(values, decision.num_speculative_tokens)
        predicted.add_metric(values, decision.predicted_seconds)
        measured.add_metric(values, decision.measured_seconds)
        if decision.gain:
            gain.add_metric(values, decision.gain)
    yield from (tokens, gain, predicted, measured)


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
        (
            "draft_ahead_awaited_rounds",
            "Rounds whose proposal was to be drafted ahead, on the replica.",
            lambda shot: shot.figures.ahead.awaited,
        ),
        ("draft_ahead_hits", "Of these, those that found it.", lambda shot: shot.figures.ahead.hits),
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
    return [shot for shot in replicas if shot.role is role][:_MAX_REPLICAS]
