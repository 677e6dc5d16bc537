"""Metrics of requests, speculation and load, named as in vLLM and MAX with `tandem_` in front."""

from __future__ import annotations

import collections
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.rejection import STRATEGIES
from coordinator.stats.ahead import MAX_RANKS
from coordinator.stats.rounds import RoundTimes
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
)
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.rpc.channels import MessageWaits
from tandem.speculation_state import SpeculationDecision
from tandem.telemetry.metrics import (
    LATENCY_SECONDS,
    STEP_SECONDS,
    TOKENS,
    LightHistogram,
    OnLoop,
    Series,
)
from tandem.types import AheadStats, SpeculationStats

OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "invalid",
    "refused",
    "deadline",
    "unavailable",
    "aborted",
    "error",
)
"""How a request ends."""
FALLBACKS = ("draft_lost", "draft_late", "draft_paused")
"""Events after which the target continues alone."""
FAILOVERS = ("target_lost", "target_resumed", "draft_resumed")
"""Events of sequences that change their replica."""
PEERS = ("draft", "target")
_PHASES = ("draft", "verify", "sampling", "wait")
WAIT_PLACES = ("event_loop", "answer", "question")
"""A round waits until the event loop reads its answer, until its request goes on with that, and until its next question
is written."""
_MAX_POSITIONS = 32
_BEYOND_RANKS = f"{MAX_RANKS + 1}+"
_MAX_RULES = 16


class CoordinatorMetrics:
    """Every metric that requests add to. `of` gives those of one model, with the labels looked up once."""

    def __init__(self, registry: CollectorRegistry, *, measures_waits: bool = False) -> None:
        self._registry = registry
        speculation = {
            "rounds": "Verifications, with or without a proposal.",
            "drafts": "Verifications that had a proposal.",
            "draft_tokens": "Tokens proposed.",
            "accepted_tokens": "Tokens proposed and accepted.",
        }
        positions = {
            "draft_tokens": "Tokens proposed at a position.",
            "accepted_tokens": "Tokens accepted at a position.",
            "reached_tokens": "Tokens proposed at a position, all before them accepted.",
        }
        self.speculation = {
            name: self._counter(f"spec_decode_num_{name}", text, "rule") for name, text in speculation.items()
        }
        self.positions = {
            name: self._counter(f"spec_decode_num_{name}_per_pos", text, "position")
            for name, text in positions.items()
        }
        self.ahead_awaited = self._counter(
            "draft_ahead_awaited_rounds", "Rounds whose proposal was to be drafted ahead."
        )
        self.ahead_hits = self._counter(
            "draft_ahead_hits", "Of these, those that found it, by place of the outcome from 1 on.", "rank"
        )
        self.ahead_saved = self._counter(
            "draft_ahead_saved_seconds", "Usual time to wait for a proposal, added up over the hits."
        )
        self.requests = self._counter("requests", "Requests that ended, by outcome.", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.wire = self._counter(
            "wire_bytes", "Serialized messages between coordinator and services.", "peer", "direction"
        )
        self.fallbacks = self._counter("fallbacks", "Times that the target went on alone.", "kind")
        self.failovers = self._counter("failovers", "Times that a sequence changed its replica.", "kind")
        self.phase = self._light(
            "round_phase_seconds",
            "Time of a round by phase, the first round left out.",
            STEP_SECONDS,
            "phase",
        )
        self.waits = self._round_waits() if measures_waits else None
        self.prefill = self._seconds("prefill_seconds", "First round of a request.")
        self.first_token = self._seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._light(
            "inter_token_latency_seconds", "Between two chunks of a request.", LATENCY_SECONDS
        )
        self.per_token = self._seconds(
            "request_time_per_output_token_seconds",
            "Time from the first token to the end, by token after it.",
        )
        self.latency = self._seconds("e2e_request_latency_seconds", "From arrival to end.")
        self.queue = self._seconds("request_queue_time_seconds", "From arrival to the request's place.")
        self.request_prompt = self._sizes("request_prompt_tokens", "Prompt tokens of a request.")
        self.request_generation = self._sizes("request_generation_tokens", "Tokens generated of a request.")
        self.of = cache(lambda model_name: ModelMetrics(self, model_name))

    def _round_waits(self) -> LightHistogram:
        text = "Time that a round waits in the coordinator, by place; with measure_waits."
        return self._light("round_wait_seconds", text, STEP_SECONDS, "place")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", text, ("model_name", *labels), registry=self._registry)

    def _light(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> LightHistogram:
        return LightHistogram(f"tandem_{name}", text, ("model_name", *labels), bounds, self._registry)

    def _seconds(self, name: str, text: str, bounds: tuple[float, ...] = LATENCY_SECONDS) -> Histogram:
        return Histogram(f"tandem_{name}", text, ("model_name",), registry=self._registry, buckets=bounds)

    def _sizes(self, name: str, text: str) -> Histogram:
        return self._seconds(name, text, TOKENS)


class ModelMetrics:
    """The metrics of one target model. All their series exist from the start, so that rates have a beginning."""

    def __init__(self, metrics: CoordinatorMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._rules: dict[str, list[Counter]] = {}
        self._positions: list[tuple[Counter, Counter, Counter]] = []
        self.ahead_awaited = metrics.ahead_awaited.labels(model_name)
        self.ahead_hits = {
            rank: metrics.ahead_hits.labels(model_name, rank)
            for rank in (*map(str, range(1, MAX_RANKS + 1)), _BEYOND_RANKS)
        }
        self.ahead_saved = metrics.ahead_saved.labels(model_name)
        self.requests = {name: metrics.requests.labels(model_name, name) for name in OUTCOMES}
        self.prompt_tokens = metrics.prompt_tokens.labels(model_name)
        self.generation_tokens = metrics.generation_tokens.labels(model_name)
        self.wire = {
            (peer, direction): metrics.wire.labels(model_name, peer, direction)
            for peer in PEERS
            for direction in ("sent", "received")
        }
        self.events = {name: metrics.fallbacks.labels(model_name, name) for name in FALLBACKS} | {
            name: metrics.failovers.labels(model_name, name) for name in FAILOVERS
        }
        self.first_token = metrics.first_token.labels(model_name)
        self.per_token = metrics.per_token.labels(model_name)
        self.latency = metrics.latency.labels(model_name)
        self.queue = metrics.queue.labels(model_name)
        self.prefill = metrics.prefill.labels(model_name)
        self.request_prompt = metrics.request_prompt.labels(model_name)
        self.request_generation = metrics.request_generation.labels(model_name)
        self._inter_token = metrics.inter_token.labels(model_name)
        phases = [metrics.phase.labels(model_name, phase) for phase in _PHASES]
        self._draft, self._verify, self._sampling, self._wait = phases
        self.message_waits: MessageWaits | None = None
        """None: nobody measures."""
        self.event_loop_wait: Series | None = None
        if metrics.waits is not None:
            loop, answer, question = (metrics.waits.labels(model_name, place) for place in WAIT_PLACES)
            self.event_loop_wait = loop
            self.message_waits = MessageWaits(answer.observe, question.observe)

    def prepare(self, position_count: int) -> None:
        """Begin the series of every acceptance rule and of so many positions: a rate needs a value to start from."""
        for strategy in STRATEGIES:
            self._of_rule(strategy.name)
        self._at_positions(position_count)

    def round(self, timed: RoundTimes) -> None:
        """Time a round that is not a request's first."""
        self._draft.observe(timed.draft)
        self._verify.observe(timed.verify)
        self._sampling.observe(timed.sampling)
        self._wait.observe(timed.wait)
        self._inter_token.observe(timed.seconds)

    def speculated(self, rule: str, stats: SpeculationStats) -> None:
        """Count what speculation did under a rule."""
        proposals = stats.positions[0].drafted if stats.positions else 0
        counts = (stats.rounds, proposals, stats.drafted, stats.accepted)
        for counter, count in zip(self._of_rule(rule), counts, strict=True):
            counter.inc(count)
        for (drafted, accepted, reached), position in zip(
            self._at_positions(len(stats.positions)), stats.positions, strict=False
        ):
            drafted.inc(position.drafted)
            accepted.inc(position.accepted)
            reached.inc(position.reached)
        if stats.ahead.awaited:
            self._drafted_ahead(stats.ahead)

    def _drafted_ahead(self, ahead: AheadStats) -> None:
        self.ahead_awaited.inc(ahead.awaited)
        self.ahead_saved.inc(ahead.saved_seconds)
        for rank, hits in enumerate(ahead.hits_by_rank, start=1):
            self.ahead_hits[str(rank)].inc(hits)
        self.ahead_hits[_BEYOND_RANKS].inc(ahead.hits - sum(ahead.hits_by_rank))

    def _of_rule(self, rule: str) -> list[Counter]:
        if rule not in self._rules:
            name = rule if len(self._rules) < _MAX_RULES else "other"
            self._rules[rule] = [c.labels(self._model_name, name) for c in self._metrics.speculation.values()]
        return self._rules[rule]

    def _at_positions(self, count: int) -> Iterator[tuple[Counter, Counter, Counter]]:
        while len(self._positions) < count:
            index = len(self._positions)
            # From 1, as everything else here counts positions; vLLM's metric of that name counts from 0.
            name = str(index + 1) if index < _MAX_POSITIONS else f"{_MAX_POSITIONS + 1}+"
            drafted, accepted, reached = (
                counter.labels(self._model_name, name) for counter in self._metrics.positions.values()
            )
            self._positions.append((drafted, accepted, reached))
        return iter(self._positions)


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
    counts = collections.Counter((shot.role, shot.state) for shot in state.replicas)
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
