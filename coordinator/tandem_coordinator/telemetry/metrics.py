"""Metrics of requests, speculation and load, named as in vLLM and MAX with `tandem_` in front."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from operator import attrgetter

from prometheus_client import Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tandem import errors
from tandem.acceptance.strategies import STRATEGIES
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import EngineStatistics, FinishReason, PositionStats, SpeculationStats
from tandem.telemetry.metrics import LATENCY_SECONDS, TOKENS, Metrics, Series, counter, family, histogram
from tandem_coordinator.stats import speculation
from tandem_coordinator.stats.rounds import MAX_RANKS, PHASES
from tandem_coordinator.telemetry.observer import OPERATIONS, State

ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.InvalidRequestError, "invalid"),
    (errors.CapacityError, "refused"),
    (errors.DeadlineError, "deadline"),
    (errors.AbortedError, "aborted"),
    (errors.ServiceUnavailableError, "unavailable"),
    (asyncio.CancelledError, "cancelled"),
    (GeneratorExit, "cancelled"),
)
"""Outcomes of requests by what ended them; anything else is an error."""
OUTCOMES = (*(reason.value for reason in FinishReason), *dict.fromkeys(name for _, name in ERRORS), "error")

CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50, 100)
"""Upper ends of the buckets; vLLM's, from 0 on."""

# No client and no fleet makes more series than these.
_MAX_POSITIONS = 32


class RequestMetrics(Metrics):
    """Metrics that requests add to."""

    requests: dict[str, Counter] = counter("Requests that ended, by outcome.", outcome=OUTCOMES)
    prompt_tokens: Counter = counter("Prompt tokens of requests that began.")
    fallbacks: dict[str, Counter] = counter(
        "Times that the target went on alone.", kind=("draft_lost", "draft_late", "draft_paused")
    )
    failovers: dict[str, Counter] = counter(
        "Times that a sequence changed its replica.", kind=("target_lost", "target_resumed", "draft_resumed")
    )
    round_phase_seconds: dict[str, Series] = histogram(
        "Time of a round by phase, the first left out.", phase=PHASES
    )
    inter_token_latency_seconds: Series = histogram("Between two chunks of a request.", LATENCY_SECONDS)
    prefill_seconds: Series = histogram("First round of a request.", LATENCY_SECONDS)
    time_to_first_token_seconds: dict[str, Series] = histogram(
        "From arrival to the first token.", LATENCY_SECONDS, operation=OPERATIONS
    )
    request_time_per_output_token_seconds: dict[str, Series] = histogram(
        "Time from the first token to the end, by token after it.", LATENCY_SECONDS, operation=OPERATIONS
    )
    e2e_request_latency_seconds: Callable[[str, str], Series] = histogram(
        "From arrival to end; error_type is empty unless an error ended it.",
        LATENCY_SECONDS,
        operation=OPERATIONS,
        error_type=("",),
    )
    request_queue_time_seconds: Series = histogram("From arrival to the request's place.", LATENCY_SECONDS)
    request_prompt_tokens: Series = histogram("Prompt tokens of a request.", TOKENS)
    request_generation_tokens: Series = histogram("Tokens generated of a request.", TOKENS)
    request_inference_time_seconds: Series = histogram(
        "From the request's place to its last token.", LATENCY_SECONDS
    )
    request_decode_time_seconds: Series = histogram("From the first token to the last.", LATENCY_SECONDS)
    request_params_n: Series = histogram("Completions of a prompt that are asked for (n).", CHOICES)
    request_params_max_tokens: Series = histogram("Maximum tokens of a completion.", TOKENS)
    request_max_num_generation_tokens: Series = histogram(
        "Tokens of the longest completion of a prompt.", TOKENS
    )
    request_prefill_kv_computed_tokens: Series = histogram(
        "Prompt tokens that the target had not computed before.", TOKENS
    )
    prompt_tokens_cached: Counter = counter("Prompt tokens that the target had computed before.")
    prompt_tokens_by_source: dict[str, Counter] = counter(
        "Prompt tokens that the target computed, or had computed before.",
        source=("local_compute", "local_cache_hit"),
    )
    request_preemptions: Counter = counter("Times that a target took the pages of a request for another.")
    request_num_preemptions: Series = histogram("Such times of a request.", PREEMPTIONS)


class WaitMetrics(Metrics):
    """The series that `measure_waits` adds: a round waits until the event loop reads its answer, until its request
    goes on with that, and until its next question is written."""

    round_wait_seconds: dict[str, Series] = histogram(
        "Time that a round waits in the coordinator, by place; with measure_waits.",
        place=("event_loop", "answer", "question"),
    )


# ---- the coordinator's state at scrape time

_Make = Callable[..., Metric]
"""`family` for the model: takes a name, a text, values by labels, and the labels' names."""


def state_metrics(state: State, wire_bytes: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Load, bytes by peer and direction, speculation, decisions and replicas."""
    model = {"model_name": state.model_name}
    gauge: _Make = partial(family, GaugeMetricFamily, model)
    counter: _Make = partial(family, CounterMetricFamily, model)
    yield gauge("num_requests_running", "Requests that have a place.", state.running)
    yield gauge("num_requests_waiting", "Requests that wait for a place.", state.queued)
    waiting = {("capacity",): state.queued}
    yield gauge("num_requests_waiting_by_reason", "Requests that wait, by reason.", waiting, "reason")
    rejections = {(reason,): count for reason, count in state.rejections.items()}
    yield counter("admission_rejections", "Requests that found no room, by limit.", rejections, "reason")
    yield counter("generation_tokens", "Tokens generated.", state.generated_tokens)
    text = "Serialized messages between coordinator and services."
    yield counter("wire_bytes", text, wire_bytes, "peer", "direction")
    yield from _speculation(state, counter)
    yield _by_length(state, model)
    if state.recent.drafted:
        yield from _recent(state.recent, gauge)
    yield from _decisions(state, gauge, counter)
    yield from _replicas(state, gauge, counter)
    yield from _engines(state, model)


def _speculation(state: State, counter: _Make) -> Iterator[Metric]:
    """Counts since the start. Rules and usual positions have series from the start on: a rate needs a first value."""
    rules = {strategy.name: SpeculationStats() for strategy in STRATEGIES} | dict(state.by_rule)
    for name, text, count in (
        ("rounds", "Verifications, with or without a proposal.", attrgetter("rounds")),
        ("drafts", "Verifications that had a proposal.", speculation.proposals),
        ("draft_tokens", "Tokens proposed.", attrgetter("drafted")),
        ("accepted_tokens", "Tokens proposed and accepted.", attrgetter("accepted")),
    ):
        counts = {(rule,): count(stats) for rule, stats in rules.items()}
        yield counter(f"spec_decode_num_{name}", text, counts, "rule")
    total = speculation.sum_stats(state.by_rule.values())
    positions = [*total.positions[:_MAX_POSITIONS]]
    usual = min(state.num_speculative_tokens, _MAX_POSITIONS)
    positions += [PositionStats() for _ in range(usual - len(positions))]
    # From 1, as everything else here counts positions; vLLM's metric of that name counts from 0.
    places = {(str(number),): [position] for number, position in enumerate(positions, start=1)}
    if beyond := total.positions[_MAX_POSITIONS:]:
        places[f"{_MAX_POSITIONS + 1}+",] = beyond
    for name, text, field in (
        ("draft", "Tokens proposed at a position.", "drafted"),
        ("accepted", "Tokens accepted at a position.", "accepted"),
        ("reached", "Tokens proposed at a position, all before them accepted.", "reached"),
    ):
        counts = {place: sum(map(attrgetter(field), several)) for place, several in places.items()}
        yield counter(f"spec_decode_num_{name}_tokens_per_pos", text, counts, "position")
    ahead = total.ahead
    for name, text, value in (
        (
            "forced_tokens",
            "Tokens that a grammar left no choice about: no model proposed them.",
            total.forced,
        ),
        ("led_rounds", "Rounds that a target had begun before it was asked.", total.lead.rounds),
        ("wasted_rounds", "Rounds that targets began unasked, and that were not wanted.", total.lead.wasted),
        ("draft_ahead_awaited_rounds", "Rounds whose proposal was to be drafted ahead.", ahead.awaited),
        (
            "draft_ahead_saved_seconds",
            "Usual time to wait for a proposal, over the hits.",
            ahead.saved_seconds,
        ),
    ):
        yield counter(name, text, value)
    ranks = {(str(rank),): 0 for rank in range(1, MAX_RANKS + 1)}
    ranks |= {(str(rank),): hits for rank, hits in enumerate(ahead.hits_by_rank, start=1)}
    ranks[f"{MAX_RANKS + 1}+",] = ahead.hits - sum(ahead.hits_by_rank)
    text = "Of these, those that found it, by place of the outcome from 1 on."
    yield counter("draft_ahead_hits", text, ranks, "rank")


_LENGTHS = ((1, "1"), (2, "2"), (3, "3"), (4, "4"), (5, "5"), (6, "6"), (7, "7"), (8, "8"), (16, "9-16"))
"""Lengths of proposals that are counted apart: the longest of each group, and its name."""
_ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Upper ends of the buckets for the accepted tokens of a proposal."""


def _by_length(state: State, model: Mapping[str, str]) -> Metric:
    """Accepted tokens of proposals, by their length."""
    counts: collections.defaultdict[str, collections.Counter[int]] = collections.defaultdict(
        collections.Counter
    )
    for (proposed, accepted), rounds in state.round_counts.items():
        if proposed:
            length = next((name for longest, name in _LENGTHS if proposed <= longest), "17+")
            counts[length][accepted] += rounds
    found = HistogramMetricFamily(
        "tandem_spec_decode_accepted_tokens",
        "Accepted tokens of a proposal, by its length.",
        labels=(*model, "proposal_length"),
    )
    for length, of_length in sorted(counts.items()):
        below = [sum(rounds for count, rounds in of_length.items() if count <= bound) for bound in _ACCEPTED]
        names = [*(repr(float(bound)) for bound in _ACCEPTED), "+Inf"]
        total = sum(count * rounds for count, rounds in of_length.items())
        buckets = [*zip(names, [*below, of_length.total()], strict=True)]
        found.add_metric((*model.values(), length), buckets, total)
    return found


def _recent(recent: SpeculationStats, gauge: _Make) -> Iterator[Metric]:
    text = "Share of the proposed tokens that were accepted, last minute."
    yield gauge("spec_decode_acceptance_rate", text, speculation.acceptance_rate(recent))
    text = "Accepted tokens by verification, last minute (MAX)."
    yield gauge("spec_decode_avg_acceptance_length", text, speculation.acceptance_length(recent))
    text = "Acceptance rate at a position, last minute."
    for name, rates in (
        ("acceptance_rate", speculation.cumulative_rates(recent)),
        ("conditional_acceptance_rate", speculation.conditional_rates(recent)),
    ):
        by_position = {(str(position),): rate for position, rate in enumerate(rates, start=1)}
        yield gauge(f"spec_decode_{name}_per_position", text, by_position, "position")


def _decisions(state: State, gauge: _Make, counter: _Make) -> Iterator[Metric]:
    # Here and with replicas the number of series stays bounded.
    names = ("target", "rule", "temperatures", "sequences", "ahead")
    decided = {
        (
            each.target,
            each.rule,
            each.temperatures,
            str(each.load),
            "on" if each.ahead_outcomes else "off",
        ): each
        for each in state.decisions[:256]
    }
    text = "Tokens proposed at a load (K); 0: target alone."
    lengths = {at: each.num_speculative_tokens for at, each in decided.items()}
    yield gauge("spec_decode_proposal_length", text, lengths, *names)
    text = "Predicted tokens per second with the best K above 0, over those of the target alone."
    gains = {at: each.gain or None for at, each in decided.items()}
    yield gauge("spec_decode_predicted_gain", text, gains, *names)
    predicted = {at: each.predicted_seconds for at, each in decided.items()}
    yield counter("round_predicted_seconds", "Predicted time of rounds.", predicted, *names)
    measured = {at: each.measured_seconds for at, each in decided.items()}
    yield counter("round_measured_seconds", "Measured time of the same rounds.", measured, *names)


def _replicas(state: State, gauge: _Make, counter: _Make) -> Iterator[Metric]:
    counted = collections.Counter((shot.role.value, shot.state.value) for shot in state.replicas)
    every = {
        (role.value, each.value): counted[role.value, each.value] for role in Role for each in ReplicaState
    }
    yield gauge("replicas", "Replicas by state.", every, "role", "state")
    listed = _list_replicas(state)
    ready = {(shot.role.value, shot.address): shot.state is ReplicaState.READY for shot in listed}
    yield gauge("replica_ready", "Whether new sequences go to the replica.", ready, "role", "address")
    awaited = "Rounds whose proposal was to be drafted ahead, on the replica."
    for kind, name, text, path in (
        (gauge, "open_sequences", "Sequences on the replica.", "open_sequences"),
        (gauge, "round_trip_seconds", "Time to answer a health check.", "round_trip_seconds"),
        (gauge, "step_seconds", "Time to answer a step.", "step_seconds"),
        (counter, "draft_tokens", "Tokens proposed, on the replica.", "figures.drafted"),
        (counter, "accepted_tokens", "Of these, those that were accepted.", "figures.accepted"),
        (counter, "draft_ahead_awaited_rounds", awaited, "figures.ahead.awaited"),
        (counter, "draft_ahead_hits", "Of these, those that found it.", "figures.ahead.hits"),
    ):
        values = {(shot.role.value, shot.address): attrgetter(path)(shot) for shot in listed}
        yield kind(f"replica_{name}", text, values, "role", "address")


def _list_replicas(state: State) -> list[ReplicaSnapshot]:
    """The replicas that have series of their own: the first ones of each role."""
    return [shot for role in Role for shot in [each for each in state.replicas if each.role is role][:128]]


def _engines(state: State, model: Mapping[str, str]) -> Iterator[Metric]:
    """Metrics of the replicas' engines. Counts stay while a replica is away, and values of the moment do not."""
    gauge: _Make = partial(family, GaugeMetricFamily, model)
    counter: _Make = partial(family, CounterMetricFamily, model)
    place = ("role", "address", "engine")
    usage: dict[tuple[str, ...], float] = {}
    configured: dict[tuple[str, ...], float] = {}
    queries: dict[tuple[str, ...], float] = {}
    hits: dict[tuple[str, ...], float] = {}
    steps = HistogramMetricFamily(
        "tandem_replica_engine_batch_tokens",
        "Tokens in a step of the replica's engine.",
        labels=(*model, *place),
    )
    for shot in _list_replicas(state):
        engine = state.engines.get((shot.role, shot.address))
        if engine is None:
            continue
        statistics = engine.statistics
        at = (shot.role.value, shot.address, str(engine.number))
        queries[at] = statistics.prefix_query_tokens
        hits[at] = statistics.prefix_hit_tokens
        histogram = statistics.step_tokens
        names = [*(repr(float(bound)) for bound in histogram.upper_bounds), "+Inf"]
        buckets = [*zip(names, accumulate(histogram.counts), strict=True)]
        steps.add_metric((*model.values(), *at), buckets, histogram.token_sum)
        if shot.state in (ReplicaState.READY, ReplicaState.DRAINING):
            usage[at] = statistics.reserved_tokens / max(1, statistics.kv_cache_tokens)
            configured[*at, *_cache_config(shot, statistics)] = 1
    text = "Share of the replica's KV cache that open sequences hold, 0 to 1."
    yield gauge("replica_kv_cache_usage_perc", text, usage, *place)
    text = "Always 1: how the replica's KV cache is divided."
    yield gauge("replica_cache_config_info", text, configured, *place, *_CACHE_CONFIG)
    text = "Tokens that sequences looked up in the replica's prefix cache."
    yield counter("replica_prefix_cache_queries", text, queries, *place)
    yield counter("replica_prefix_cache_hits", "Those of them that it held.", hits, *place)
    yield steps


_CACHE_CONFIG = (
    "block_size",
    "num_gpu_blocks",
    "enable_prefix_caching",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
)
"""Labels that vLLM's metric of that name has."""


def _cache_config(shot: ReplicaSnapshot, statistics: EngineStatistics) -> tuple[str, ...]:
    """The values of these labels."""
    tokens = statistics.kv_cache_tokens
    longest = 0 if shot.model is None else shot.model.max_length
    return (
        str(statistics.page_tokens),
        str(tokens // max(1, statistics.page_tokens)),
        str(statistics.reuses_prefixes),
        str(tokens),
        f"{tokens / max(1, longest):.2f}",
    )
