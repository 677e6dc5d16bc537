"""Metrics of requests, speculation and load, named as in vLLM and MAX with `tandem_` in front."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.rejection import STRATEGIES
from coordinator.stats.rounds import MAX_RANKS, RoundTimes
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    conditional_rates,
    cumulative_rates,
    proposals,
    summed,
)
from coordinator.telemetry.observer import State
from tandem.replica import ReplicaState, Role
from tandem.rpc.channels import MessageWaits
from tandem.telemetry.metrics import LATENCY_SECONDS, STEP_SECONDS, TOKENS, Histogram, Samples, Series, family
from tandem.types import PositionStats, SpeculationStats

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
"""Outcomes of a request."""
FALLBACKS = ("draft_lost", "draft_late", "draft_paused")
"""Events after which the target continues alone."""
FAILOVERS = ("target_lost", "target_resumed", "draft_resumed")
"""Events of sequences that change their replica."""
PEERS = ("draft", "target")
PHASES = ("draft", "verify", "sampling", "wait")
"""Parts of a round, by their names in `RoundTimes`."""
WAIT_PLACES = ("event_loop", "answer", "question")
"""A round waits until the event loop reads its answer, until its request goes on with that, and until its next question
is written."""

DIRECTIONS = ("sent", "received")

# No client and no fleet makes more series than these.
_MAX_POSITIONS = 32


class RequestMetrics:
    """Metrics that requests add to. All series exist from the start: a rate needs a first value."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        measures_waits: bool = False,
    ) -> None:
        """Register all of them, with the target's name as a label; `measures_waits` adds `MessageWaits`."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", text, ("model_name", *labels), registry=registry)

        def histogram(
            name: str, text: str, bounds: Sequence[float] = LATENCY_SECONDS, *labels: str
        ) -> Histogram:
            return Histogram(f"tandem_{name}", text, ("model_name", *labels), bounds, registry)

        def by(counted: Counter, values: tuple[str, ...]) -> dict[str, Counter]:
            return {value: counted.labels(model_name, value) for value in values}

        def times(name: str, text: str, bounds: Sequence[float] = LATENCY_SECONDS) -> Series:
            return histogram(name, text, bounds).labels(model_name)

        self.requests = by(counter("requests", "Requests that ended, by outcome.", "outcome"), OUTCOMES)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.").labels(
            model_name
        )
        fallbacks = counter("fallbacks", "Times that the target went on alone.", "kind")
        failovers = counter("failovers", "Times that a sequence changed its replica.", "kind")
        self.events = by(fallbacks, FALLBACKS) | by(failovers, FAILOVERS)
        text = "Time of a round by phase, the first round left out."
        phases = histogram("round_phase_seconds", text, STEP_SECONDS, "phase")
        self._phases = {phase: phases.labels(model_name, phase) for phase in PHASES}
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

    def round(self, timed: RoundTimes) -> None:
        """Time a round that is not a request's first."""
        for phase, series in self._phases.items():
            series.observe(getattr(timed, phase))
        self._inter_token.observe(timed.seconds)


# ---- the coordinator's state at scrape time


def state_metrics(state: State, wire_bytes: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Load, bytes by peer and direction, speculation, decisions and replicas."""
    model = (state.model_name,)
    yield _gauge("num_requests_running", "Requests that have a place.", [(model, state.running)])
    yield _gauge("num_requests_waiting", "Requests that wait for a place.", [(model, state.queued)])
    yield _counter("generation_tokens", "Tokens generated.", [(model, state.generated_tokens)])
    text = "Serialized messages between coordinator and services."
    wire = [((*model, *at), count) for at, count in wire_bytes.items()]
    yield _counter("wire_bytes", text, wire, "peer", "direction")
    yield from _speculation(state)
    if state.recent.drafted:
        yield from _recent(state.model_name, state.recent)
    yield from _decisions(state)
    counts = collections.Counter((shot.role, shot.state) for shot in state.replicas)
    roles = [((*model, role.value, each.value), counts[role, each]) for role in Role for each in ReplicaState]
    yield _gauge("replicas", "Replicas by state.", roles, "role", "state")
    yield from _replicas(state)


_Family = Callable[..., Metric]


def _gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return family(GaugeMetricFamily, name, text, ("model_name", *labels), samples)


def _counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return family(CounterMetricFamily, name, text, ("model_name", *labels), samples)


def _speculation(state: State) -> Iterator[Metric]:
    """Counts since the start. Rules and usual positions have series from the start on: a rate needs a first value."""
    model, total = state.model_name, summed(state.by_rule.values())
    rules = {strategy.name: SpeculationStats() for strategy in STRATEGIES} | dict(state.by_rule)
    of_rules: tuple[tuple[str, str, Callable[[SpeculationStats], int]], ...] = (
        ("rounds", "Verifications, with or without a proposal.", lambda stats: stats.rounds),
        ("drafts", "Verifications that had a proposal.", proposals),
        ("draft_tokens", "Tokens proposed.", lambda stats: stats.drafted),
        ("accepted_tokens", "Tokens proposed and accepted.", lambda stats: stats.accepted),
    )
    for name, text, count in of_rules:
        counts = [((model, rule), count(stats)) for rule, stats in rules.items()]
        yield _counter(f"spec_decode_num_{name}", text, counts, "rule")
    positions = [*total.positions[:_MAX_POSITIONS]]
    usual = min(state.num_speculative_tokens, _MAX_POSITIONS)
    positions += [PositionStats() for _ in range(usual - len(positions))]
    # From 1, as everything else here counts positions; vLLM's metric of that name counts from 0.
    named = [(str(number), [position]) for number, position in enumerate(positions, start=1)]
    if beyond := total.positions[_MAX_POSITIONS:]:
        named.append((f"{_MAX_POSITIONS + 1}+", beyond))
    of_positions: tuple[tuple[str, str, Callable[[PositionStats], int]], ...] = (
        ("draft", "Tokens proposed at a position.", lambda position: position.drafted),
        ("accepted", "Tokens accepted at a position.", lambda position: position.accepted),
        ("reached", "Tokens proposed at a position, all before them accepted.", lambda at: at.reached),
    )
    for name, text, of in of_positions:
        counts = [((model, place), sum(map(of, several))) for place, several in named]
        yield _counter(f"spec_decode_num_{name}_tokens_per_pos", text, counts, "position")
    text = "Rounds that a target had begun before it was asked."
    yield _counter("led_rounds", text, [((model,), total.lead.rounds)])
    text = "Rounds that targets began before they were asked, and that were not wanted."
    yield _counter("wasted_rounds", text, [((model,), total.lead.wasted)])
    ahead = total.ahead
    text = "Rounds whose proposal was to be drafted ahead."
    yield _counter("draft_ahead_awaited_rounds", text, [((model,), ahead.awaited)])
    text = "Usual time to wait for a proposal, added up over the hits."
    yield _counter("draft_ahead_saved_seconds", text, [((model,), ahead.saved_seconds)])
    by_rank = dict(enumerate(ahead.hits_by_rank, start=1))
    ranks = [((model, str(rank)), by_rank.get(rank, 0)) for rank in range(1, MAX_RANKS + 1)]
    ranks.append(((model, f"{MAX_RANKS + 1}+"), ahead.hits - sum(ahead.hits_by_rank)))
    text = "Of these, those that found it, by place of the outcome from 1 on."
    yield _counter("draft_ahead_hits", text, ranks, "rank")


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
    # The number of series stays bounded
    for each in state.decisions[:256]:
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
    # The number of series stays bounded; the counts include all replicas
    shots = [
        ((state.model_name, shot.role.value, shot.address), shot)
        for role in Role
        for shot in [each for each in state.replicas if each.role is role][:128]
    ]
    values: tuple[tuple[_Family, str, str, str], ...] = (
        (_gauge, "open_sequences", "Sequences on the replica.", "open_sequences"),
        (_gauge, "round_trip_seconds", "Time to answer a health check.", "round_trip_seconds"),
        (_gauge, "step_seconds", "Time to answer a step.", "step_seconds"),
        (_counter, "draft_tokens", "Tokens proposed, on the replica.", "figures.drafted"),
        (_counter, "accepted_tokens", "Of these, those that were accepted.", "figures.accepted"),
        (
            _counter,
            "draft_ahead_awaited_rounds",
            "Rounds whose proposal was to be drafted ahead, on the replica.",
            "figures.ahead.awaited",
        ),
        (_counter, "draft_ahead_hits", "Of these, those that found it.", "figures.ahead.hits"),
    )
    ready = [(at, shot.state is ReplicaState.READY) for at, shot in shots]
    yield _gauge("replica_ready", "Whether new sequences go to the replica.", ready, "role", "address")
    for kind, name, text, path in values:
        found = [(at, value) for at, shot in shots if (value := attrgetter(path)(shot)) is not None]
        yield kind(f"replica_{name}", text, found, "role", "address")
