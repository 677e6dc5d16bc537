"""What the dashboard shows: sections of panels, each with its queries and a sentence on how to read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called; {{label}} stands for a label's value."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; width and height in Grafana's grid of 24 columns."""

    title: str
    description: str
    queries: list[Query]
    kind: Literal["stat", "timeseries", "bargauge", "state-timeline"] = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    top: float | None = None
    """Upper end of the scale, which then begins at 0."""
    stacked: bool = False
    steps: dict[float, str] = field(default_factory=dict)
    """Colours of a stat or a state, each from that value on."""


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the dashboard with its title."""

    title: str
    panels: list[Panel]


def counted(name: str, more: str = "", by: str = "", window: str = "$__rate_interval") -> str:
    """A counter's growth a second, summed over coordinators."""
    return f'sum{by}(rate({name}{{model_name=~"$model"{more}}}[{window}]))'


def quantile(share: float, name: str, window: str = "$__rate_interval") -> str:
    """That share of what a histogram counted is below this."""
    return f"histogram_quantile({share}, {counted(f'{name}_bucket', by=' by (le) ', window=window)})"


def quantiles(name: str) -> list[Query]:
    """The quantiles of a histogram that people ask for."""
    return [Query(quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def per(numerator: str, denominator: str) -> str:
    """A ratio that is absent, not a division by zero, where nothing was counted."""
    return f"{numerator} / ({denominator} > 0)"


PREFIX = "tandem_spec_decode_num"
ACCEPTED, DRAFTED = f"{PREFIX}_accepted_tokens", f"{PREFIX}_draft_tokens"
DRAFTS, ROUNDS = f"{PREFIX}_drafts_total", f"{PREFIX}_rounds_total"
REACHED = f"{PREFIX}_reached_tokens"
TOKENS, PHASES = "tandem_generation_tokens_total", "tandem_round_phase_seconds"
BY_POSITION = " by (position) "
RED, ORANGE, GREEN, PLAIN = "red", "orange", "green", "text"


def acceptance_rate(window: str = "$__rate_interval") -> str:
    """Share of the proposed tokens that were accepted."""
    return per(counted(f"{ACCEPTED}_total", window=window), counted(f"{DRAFTED}_total", window=window))


def tokens_per_verification(window: str = "$__rate_interval") -> str:
    """vLLM's mean acceptance length: the accepted tokens of a proposal and the one that the target supplies."""
    return "1 + " + per(counted(f"{ACCEPTED}_total", window=window), counted(DRAFTS, window=window))


def speed_up(window: str = "$__rate_interval") -> str:
    """Tokens a round, times the share of a round that is the target's: against one token for each target step."""
    tokens = per(counted(TOKENS, window=window), counted(ROUNDS, window=window))
    verify = counted(f"{PHASES}_sum", ', phase="verify"', window=window)
    return f"{tokens} * ({per(verify, counted(f'{PHASES}_sum', window=window))})"


def stat(title: str, description: str, expression: str, unit: str, steps: dict[float, str]) -> Panel:
    """One number."""
    return Panel(title, description, [Query(expression)], "stat", unit, 4, 4, steps=steps)


SECTIONS = [
    Section(
        "Does speculation pay?",
        [
            stat(
                "Acceptance rate",
                "Accepted of the proposed tokens. Below one half, propose fewer tokens or take a draft that knows the "
                "target better.",
                acceptance_rate("1m"),
                "percentunit",
                {0: RED, 0.3: ORANGE, 0.5: GREEN},
            ),
            stat(
                "Tokens a verification",
                "The mean acceptance length as vLLM counts it: the accepted tokens of a proposal, and the one that the "
                "target supplies. Verifications without a proposal do not count.",
                tokens_per_verification("1m"),
                "short",
                {0: RED, 1.5: ORANGE, 2: GREEN},
            ),
            stat(
                "Speed-up, estimated",
                "Tokens a round, times the share of a round that the target takes. It counts a verification as long as "
                "a step of the target alone, so it is a little high. Below 1, speculation costs more than it gives.",
                speed_up("1m"),
                "x",
                {0: RED, 1: ORANGE, 1.2: GREEN},
            ),
            stat("Tokens a second", "Sent to clients.", counted(TOKENS, window="1m"), "short", {0: PLAIN}),
            stat(
                "Time to first token",
                "Half of the requests have their first token within this time.",
                quantile(0.5, "tandem_time_to_first_token_seconds", "1m"),
                "s",
                {0: PLAIN},
            ),
            stat(
                "Requests waiting",
                "For a place at the coordinator.",
                'sum(tandem_num_requests_waiting{model_name=~"$model"})',
                "short",
                {0: GREEN, 1: ORANGE, 32: RED},
            ),
        ],
    ),
    Section(
        "Acceptance",
        [
            Panel(
                "Acceptance rate",
                "Accepted of the proposed tokens, for all and for each acceptance rule.",
                [
                    Query(acceptance_rate(), "all"),
                    Query(
                        per(
                            counted(f"{ACCEPTED}_total", by=" by (rule) "),
                            counted(f"{DRAFTED}_total", by=" by (rule) "),
                        ),
                        "{{rule}}",
                    ),
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Acceptance length",
                "Tokens for each verification of a proposal (vLLM), and accepted tokens for any verification, "
                "with or without one (MAX). Far apart: many rounds go without a draft.",
                [
                    Query(tokens_per_verification(), "tokens a verification (vLLM)"),
                    Query(per(counted(f"{ACCEPTED}_total"), counted(ROUNDS)), "accepted (MAX)"),
                    Query(per(counted(f"{DRAFTED}_total"), counted(DRAFTS)), "proposed"),
                ],
            ),
            Panel(
                "Tokens proposed",
                "What is rejected was computed for nothing. When it is the larger part, propose fewer tokens.",
                [
                    Query(counted(f"{ACCEPTED}_total"), "accepted"),
                    Query(f"{counted(f'{DRAFTED}_total')} - {counted(f'{ACCEPTED}_total')}", "rejected"),
                ],
                stacked=True,
            ),
            Panel(
                "By position, cumulative",
                "Of the tokens proposed at each position, the share that was accepted. Positions far below the first "
                "are not worth proposing.",
                [
                    Query(
                        per(
                            counted(f"{ACCEPTED}_per_pos_total", by=BY_POSITION, window="1m"),
                            counted(f"{DRAFTED}_per_pos_total", by=BY_POSITION, window="1m"),
                        ),
                        "{{position}}",
                    )
                ],
                kind="bargauge",
                unit="percentunit",
                top=1,
                height=7,
            ),
            Panel(
                "By position, given all before",
                "Of the tokens whose predecessors were all accepted, the share that was. Level bars: the draft is as "
                "good at each position, and only the product falls.",
                [
                    Query(
                        per(
                            counted(f"{ACCEPTED}_per_pos_total", by=BY_POSITION, window="1m"),
                            counted(f"{REACHED}_per_pos_total", by=BY_POSITION, window="1m"),
                        ),
                        "{{position}}",
                    )
                ],
                kind="bargauge",
                unit="percentunit",
                top=1,
                height=7,
            ),
            Panel(
                "Acceptance rate by draft replica",
                "One that differs from the others serves another model or another configuration.",
                [
                    Query(
                        per(
                            counted(
                                "tandem_replica_accepted_tokens_total", ', role="draft"', " by (address) "
                            ),
                            counted("tandem_replica_draft_tokens_total", ', role="draft"', " by (address) "),
                        ),
                        "{{address}}",
                    )
                ],
                unit="percentunit",
                top=1,
                height=7,
            ),
        ],
    ),
    Section(
        "Speed",
        [
            Panel("Tokens a second", "Sent to clients.", [Query(counted(TOKENS), "tokens")]),
            Panel(
                "Speed-up, estimated",
                "Against the target alone; 1 is where speculation neither gives nor costs. See the number above.",
                [Query(speed_up(), "speed-up"), Query("vector(1)", "the target alone")],
                unit="x",
            ),
            Panel(
                "Round by phase",
                "Mean time of a round, and where it goes: asking the draft, asking the target, the acceptance rule, "
                "and between rounds.",
                [
                    Query(
                        f"{counted(f'{PHASES}_sum', by=' by (phase) ')} "
                        f"/ ignoring(phase) group_left () ({counted(ROUNDS)} > 0)",
                        "{{phase}}",
                    )
                ],
                unit="s",
                stacked=True,
            ),
            Panel(
                "Time to first token",
                "From a request's arrival; the wait for a place included.",
                quantiles("tandem_time_to_first_token_seconds"),
                unit="s",
            ),
            Panel(
                "Inter-token latency",
                "Between two pieces of a completion; with speculation a piece holds several tokens.",
                quantiles("tandem_inter_token_latency_seconds"),
                unit="s",
            ),
            Panel(
                "Time per output token",
                "Of a whole request, after its first token.",
                quantiles("tandem_request_time_per_output_token_seconds"),
                unit="s",
            ),
        ],
    ),
    Section(
        "Replicas and capacity",
        [
            Panel(
                "Ready replicas",
                "Each replica that the coordinator knows, while it is ready and while it is not.",
                [Query("tandem_replica_ready", "{{role}} {{address}}")],
                kind="state-timeline",
                steps={0: RED, 1: GREEN},
            ),
            Panel(
                "Replicas by state",
                "Draining ones take no new sequences; incompatible ones serve a model that does not fit.",
                [Query("sum by (role, state) (tandem_replicas) > 0", "{{role}} {{state}}")],
                stacked=True,
            ),
            Panel(
                "Open sequences",
                "On each replica: new ones go to the one with the fewest.",
                [Query("sum by (role, address) (tandem_replica_open_sequences)", "{{role}} {{address}}")],
            ),
            Panel(
                "KV cache in use",
                "Reserved of the capacity, in each process. When it is full, sequences wait.",
                [Query("tandem_kv_cache_usage_perc", "{{role}} {{instance}}")],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Requests and queues",
                "Requests at the coordinator, and sequences that wait for a place in a KV cache.",
                [
                    Query('sum(tandem_num_requests_running{model_name=~"$model"})', "running"),
                    Query('sum(tandem_num_requests_waiting{model_name=~"$model"})', "waiting"),
                    Query("sum by (role) (tandem_num_sequences_waiting)", "waiting for {{role}}'s cache"),
                ],
            ),
            Panel(
                "Batch",
                "Mean number of sequences in one forward pass: what a busy target shares its weights among.",
                [
                    Query(
                        "sum by (role) (rate(tandem_engine_batch_sequences_sum[$__rate_interval])) / "
                        "(sum by (role) (rate(tandem_engine_batch_sequences_count[$__rate_interval])) > 0)",
                        "{{role}}",
                    )
                ],
            ),
            Panel(
                "Step of a model",
                "Mean time of one forward pass.",
                [
                    Query(
                        "sum by (role) (rate(tandem_engine_step_seconds_sum[$__rate_interval])) / "
                        "(sum by (role) (rate(tandem_engine_step_seconds_count[$__rate_interval])) > 0)",
                        "{{role}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Step seen by the coordinator",
                "Moving average of a step, the network and the wait for the model included.",
                [
                    Query("tandem_replica_step_seconds", "{{role}} {{address}}"),
                    Query("tandem_replica_round_trip_seconds", "{{role}} {{address}} round trip"),
                ],
                unit="s",
            ),
            Panel(
                "Bytes for each accepted token",
                "On the wire, between the coordinator and the services. Dense rows cost half a megabyte each.",
                [Query(per(counted("tandem_wire_bytes_total"), counted(f"{ACCEPTED}_total")), "bytes")],
                unit="bytes",
            ),
        ],
    ),
    Section(
        "Trouble",
        [
            Panel(
                "Without a draft",
                "Times that the target went on alone: the draft was lost, late, or paused because it did not pay.",
                [Query("sum by (kind) (increase(tandem_fallbacks_total[$__rate_interval]))", "{{kind}}")],
            ),
            Panel(
                "Failovers",
                "Sequences that lost their replica, and those that found another.",
                [Query("sum by (kind) (increase(tandem_failovers_total[$__rate_interval]))", "{{kind}}")],
            ),
            Panel(
                "Requests by outcome",
                "stop and length are completions; the rest did not end by themselves.",
                [Query(f"{counted('tandem_requests_total', by=' by (outcome) ')} > 0", "{{outcome}}")],
                stacked=True,
            ),
        ],
    ),
]
