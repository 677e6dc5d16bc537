"""Metrics of requests, speculation and load, named as in vLLM and MAX with `tandem_` in front."""

from __future__ import annotations

import collections
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.rejection import STRATEGIES
from coordinator.stats.rounds import MAX_RANKS, RoundTimes
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
    summed,
)
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.rpc.channels import MessageWaits
from tandem.speculation_state import SpeculationDecision
from tandem.telemetry.metrics import LATENCY_SECONDS, STEP_SECONDS, TOKENS, Histogram, Series
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
WAIT_PLACES = ("event_loop", "answer", "question")
"""A round waits until the event loop reads its answer, until its request goes on with that, and until its next question
is written."""

# No client and no fleet makes more series than these.
_MAX_POSITIONS = 32
_MAX_RULES = 16
_MAX_DECISIONS = 256
"""Loads, rules and temperature ranges with metrics of their own."""
_MAX_REPLICAS = 128
"""Replicas of each role with metrics of their own. The counts include all."""
_BEYOND_RANKS = f"{MAX_RANKS + 1}+"

_WINDOW_SECONDS, _PART_SECONDS = 60.0, 5.0


class RequestMetrics:
    """What requests add to. All series exist from the start, since a rate needs a value to start from."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        position_count: int = 0,
        *,
        measures_waits: bool = False,
    ) -> None:
        """
        Args:
            registry: Takes the metrics.
            model_name: Of the target, a label of them all.
            position_count: Tokens that a proposal usually has.
            measures_waits: Whether to time where rounds wait in the coordinator.
        """

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", text, ("model_name", *labels), registry=registry)

        def histogram(
            name: str, text: str, bounds: Sequence[float] = LATENCY_SECONDS, *labels: str
        ) -> Histogram:
            return Histogram(f"tandem_{name}", text, ("model_name", *labels), bounds, registry)

        def by(counted: Counter, *values: tuple[str, ...]) -> list[Counter]:
            """A series for each combination of label values."""
            return [counted.labels(model_name, *each) for each in product(*values)]

        def times(name: str, text: str, bounds: Sequence[float] = LATENCY_SECONDS) -> Series:
            return histogram(name, text, bounds).labels(model_name)

        self._model_name = model_name
        self._by_rule = [
            counter(f"spec_decode_num_{name}", text, "rule")
            for name, text in (
                ("rounds", "Verifications, with or without a proposal."),
                ("drafts", "Verifications that had a proposal."),
                ("draft_tokens", "Tokens proposed."),
                ("accepted_tokens", "Tokens proposed and accepted."),
            )
        ]
        self._by_position = [
            counter(f"spec_decode_num_{name}_per_pos", text, "position")
            for name, text in (
                ("draft_tokens", "Tokens proposed at a position."),
                ("accepted_tokens", "Tokens accepted at a position."),
                ("reached_tokens", "Tokens proposed at a position, all before them accepted."),
            )
        ]
        (self._ahead_awaited,) = by(
            counter("draft_ahead_awaited_rounds", "Rounds whose proposal was to be drafted ahead.")
        )
        (self._ahead_saved,) = by(
            counter("draft_ahead_saved_seconds", "Usual time to wait for a proposal, added up over the hits.")
        )
        text = "Of these, those that found it, by place of the outcome from 1 on."
        ranks = (*map(str, range(1, MAX_RANKS + 1)), _BEYOND_RANKS)
        self._ahead_hits = dict(zip(ranks, by(counter("draft_ahead_hits", text, "rank"), ranks), strict=True))
        requests = counter("requests", "Requests that ended, by outcome.", "outcome")
        self.requests = dict(zip(OUTCOMES, by(requests, OUTCOMES), strict=True))
        (self.prompt_tokens,) = by(counter("prompt_tokens", "Prompt tokens of requests that began."))
        (self.generation_tokens,) = by(counter("generation_tokens", "Tokens generated."))
        text = "Serialized messages between coordinator and services."
        wire = counter("wire_bytes", text, "peer", "direction")
        directions = ("sent", "received")
        self.wire = dict(zip(product(PEERS, directions), by(wire, PEERS, directions), strict=True))
        fallbacks = counter("fallbacks", "Times that the target went on alone.", "kind")
        failovers = counter("failovers", "Times that a sequence changed its replica.", "kind")
        counted = [*by(fallbacks, FALLBACKS), *by(failovers, FAILOVERS)]
        self.events = dict(zip((*FALLBACKS, *FAILOVERS), counted, strict=True))
        text = "Time of a round by phase, the first round left out."
        phases = histogram("round_phase_seconds", text, STEP_SECONDS, "phase")
        self._draft, self._verify, self._sampling, self._wait = (
            phases.labels(model_name, phase) for phase in ("draft", "verify", "sampling", "wait")
        )
        self._inter_token = times("inter_token_latency_seconds", "Between two chunks of a request.")
        self.prefill = times("prefill_seconds", "First round of a request.")
        self.first_token = times("time_to_first_token_seconds", "From arrival to the first token.")
        text = "Time from the first token to the end, by token after it."
        self.per_token = times("request_time_per_output_token_seconds", text)
        self.latency = times("e2e_request_latency_seconds", "From arrival to end.")
        self.queue = times("request_queue_time_seconds", "From arrival to the request's place.")
        self.request_prompt = times("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generation = times("request_generation_tokens", "Tokens generated of a request.", TOKENS)
        self.message_waits: MessageWaits | None = None
        """None: nobody measures."""
        self.event_loop_wait: Series | None = None
        if measures_waits:
            text = "Time that a round waits in the coordinator, by place; with measure_waits."
            waits = histogram("round_wait_seconds", text, STEP_SECONDS, "place")
            self.event_loop_wait, answer, question = (
                waits.labels(model_name, place) for place in WAIT_PLACES
            )
            self.message_waits = MessageWaits(answer.observe, question.observe)
        self._rules: dict[str, list[Counter]] = {}
        self._positions: list[list[Counter]] = []
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
        for counters, position in zip(
            self._at_positions(len(stats.positions)), stats.positions, strict=False
        ):
            drafted, accepted, reached = counters
            drafted.inc(position.drafted)
            accepted.inc(position.accepted)
            reached.inc(position.reached)
        if stats.ahead.awaited:
            self._drafted_ahead(stats.ahead)

    def _drafted_ahead(self, ahead: AheadStats) -> None:
        self._ahead_awaited.inc(ahead.awaited)
        self._ahead_saved.inc(ahead.saved_seconds)
        for rank, hits in enumerate(ahead.hits_by_rank, start=1):
            self._ahead_hits[str(rank)].inc(hits)
        self._ahead_hits[_BEYOND_RANKS].inc(ahead.hits - sum(ahead.hits_by_rank))

    def _of_rule(self, rule: str) -> list[Counter]:
        if rule not in self._rules:
            name = rule if len(self._rules) < _MAX_RULES else "other"
            self._rules[rule] = [counter.labels(self._model_name, name) for counter in self._by_rule]
        return self._rules[rule]

    def _at_positions(self, count: int) -> list[list[Counter]]:
        while (index := len(self._positions)) < count:
            # From 1, as everything else here counts positions; vLLM's metric of that name counts from 0.
            name = str(index + 1) if index < _MAX_POSITIONS else f"{_MAX_POSITIONS + 1}+"
            self._positions.append([counter.labels(self._model_name, name) for counter in self._by_position])
        return self._positions


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
        return summed(stats for _, stats in self._parts)

    def _forget(self, now: float) -> None:
        while self._parts and now - self._parts[0][0] >= _WINDOW_SECONDS:
            self._parts.popleft()


# ---- the coordinator's state at scrape time


@dataclass(frozen=True, slots=True)
class State:
    """One moment."""

    model_name: str
    running: int
    queued: int
    replicas: list[ReplicaSnapshot]
    recent: SpeculationStats
    """Of the last minute."""
    decisions: Sequence[SpeculationDecision] = ()
    """How much is proposed at each load that there was."""


def state_metrics(state: State) -> Iterator[Metric]:
    """Load, acceptance of the last minute, decisions and replicas."""
    model = (state.model_name,)
    yield _gauge("num_requests_running", "Requests that have a place.", [(model, state.running)])
    yield _gauge("num_requests_waiting", "Requests that wait for a place.", [(model, state.queued)])
    if state.recent.drafted:
        yield from _recent(state.model_name, state.recent)
    yield from _decisions(state)
    counts = collections.Counter((shot.role, shot.state) for shot in state.replicas)
    roles = [((*model, role.value, each.value), counts[role, each]) for role in Role for each in ReplicaState]
    yield _gauge("replicas", "Replicas by state.", roles, "role", "state")
    yield from _replicas(state)


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by their labels."""


_Family = Callable[..., Metric]


def _gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return _with_samples(GaugeMetricFamily(f"tandem_{name}", text, labels=("model_name", *labels)), samples)


def _counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return _with_samples(CounterMetricFamily(f"tandem_{name}", text, labels=("model_name", *labels)), samples)


def _with_samples(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _recent(model: str, recent: SpeculationStats) -> Iterator[Metric]:
    text = "Share of the proposed tokens that were accepted, last minute."
    yield _gauge("spec_decode_acceptance_rate", text, [((model,), acceptance_rate(recent))])
    text = "Accepted tokens by verification, last minute (MAX)."
    yield _gauge("spec_decode_avg_acceptance_length", text, [((model,), acceptance_length(recent))])
    for name, rates in (
        ("acceptance_rate_per_position", cumulative_rates(recent)),
        ("conditional_acceptance_rate_per_position", conditional_rates(recent)),
    ):
        samples = [((model, str(position)), rate) for position, rate in enumerate(rates, start=1)]
        yield _gauge(
            f"spec_decode_{name}", "Acceptance rate at a position, last minute.", samples, "position"
        )


def _decisions(state: State) -> Iterator[Metric]:
    names = ("target", "rule", "temperatures", "sequences", "ahead")
    decided = []
    for each in state.decisions[:_MAX_DECISIONS]:
        ahead = "on" if each.ahead_outcomes else "off"
        labels = (each.target, each.rule, each.temperatures, str(each.load), ahead)
        decided.append(((state.model_name, *labels), each))
    lengths = [(labels, each.num_speculative_tokens) for labels, each in decided]
    yield _gauge(
        "spec_decode_proposal_length", "Tokens proposed at a load (K); 0: target alone.", lengths, *names
    )
    text = "Predicted tokens per second with the best K above 0, over those of the target alone."
    gains = [(labels, each.gain) for labels, each in decided if each.gain]
    yield _gauge("spec_decode_predicted_gain", text, gains, *names)
    predicted = [(labels, each.predicted_seconds) for labels, each in decided]
    yield _counter("round_predicted_seconds", "Predicted time of rounds.", predicted, *names)
    measured = [(labels, each.measured_seconds) for labels, each in decided]
    yield _counter("round_measured_seconds", "Measured time of the same rounds.", measured, *names)


def _replicas(state: State) -> Iterator[Metric]:
    shots = [
        ((state.model_name, shot.role.value, shot.address), shot)
        for role in Role
        for shot in [each for each in state.replicas if each.role is role][:_MAX_REPLICAS]
    ]
    values: tuple[tuple[_Family, str, str, Callable[[ReplicaSnapshot], float | None]], ...] = (
        (
            _gauge,
            "ready",
            "Whether new sequences go to the replica.",
            lambda shot: shot.state is ReplicaState.READY,
        ),
        (_gauge, "open_sequences", "Sequences on the replica.", lambda shot: shot.open_sequences),
        (
            _gauge,
            "round_trip_seconds",
            "Time to answer a health check.",
            lambda shot: shot.round_trip_seconds,
        ),
        (_gauge, "step_seconds", "Time to answer a step.", lambda shot: shot.step_seconds),
        (_counter, "draft_tokens", "Tokens proposed, on the replica.", lambda shot: shot.figures.drafted),
        (
            _counter,
            "accepted_tokens",
            "Of these, those that were accepted.",
            lambda shot: shot.figures.accepted,
        ),
        (
            _counter,
            "draft_ahead_awaited_rounds",
            "Rounds whose proposal was to be drafted ahead, on the replica.",
            lambda shot: shot.figures.ahead.awaited,
        ),
        (
            _counter,
            "draft_ahead_hits",
            "Of these, those that found it.",
            lambda shot: shot.figures.ahead.hits,
        ),
    )
    for family, name, text, value_of in values:
        found = [(at, value) for at, shot in shots if (value := value_of(shot)) is not None]
        yield family(f"replica_{name}", text, found, "role", "address")
