"""The parts of the dashboard: panels, sections, and the PromQL that several of them use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called; {{label}} stands for a label's value."""

    expression: str
    legend: str


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
    """Estimate a quantile from a histogram's buckets."""
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
AHEAD_AWAITED, AHEAD_HITS = "tandem_draft_ahead_awaited_rounds_total", "tandem_draft_ahead_hits_total"
AHEAD_SAVED = "tandem_draft_ahead_saved_seconds_total"
BY_POSITION = " by (position) "
RED, ORANGE, GREEN, PLAIN = "red", "orange", "green", "text"


def acceptance_rate(window: str = "$__rate_interval") -> str:
    """Share of the proposed tokens that were accepted."""
    return per(counted(f"{ACCEPTED}_total", window=window), counted(f"{DRAFTED}_total", window=window))


def tokens_per_verification(window: str = "$__rate_interval") -> str:
    """Tokens of a pass of the target that had a proposal; vLLM calls this the mean acceptance length."""
    return "1 + " + per(counted(f"{ACCEPTED}_total", window=window), counted(DRAFTS, window=window))


def speed_up(window: str = "$__rate_interval") -> str:
    """Tokens a round, times the share of a round that is the target's: against one token for each target step."""
    tokens = per(counted(TOKENS, window=window), counted(ROUNDS, window=window))
    verify = counted(f"{PHASES}_sum", ', phase="verify"', window=window)
    return f"{tokens} * ({per(verify, counted(f'{PHASES}_sum', window=window))})"


def stat(title: str, description: str, expression: str, unit: str, steps: dict[float, str]) -> Panel:
    """One number."""
    return Panel(title, description, [Query(expression, title)], "stat", unit, 4, 4, steps=steps)
