"""Views of `tandem admin` for people: numbers in words, facts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.config.origin import Origin
from tandem.config.rule import spell
from tandem.model.admin import ConfigOption, CoordinatorState, Load, RequestReport, Stats, Status, Throughput
from tandem.model.replica import ReplicaSnapshot, ReplicaState
from tandem.model.speculation_state import SpeculationDecision, SpeculationState
from tandem.model.types import AheadStats, SamplingDefaults, SpeculationStats, Weights
from tandem_coordinator.cli.command import plain_table
from tandem_coordinator.stats import speculation
from tandem_coordinator.stats.rounds import hit_rate

NOTHING = "-"
"""Shown for a value that does not exist yet."""

_STYLES = {"ready": "green"} | dict.fromkeys(("connecting", "draining", "starting", "degraded"), "yellow")
"""Colours of states; the others are red."""
_MAX_DECISIONS = 12
"""A status with more lines does not fit a terminal; JSON has them all."""
_BAR_WIDTH = 22
"""Two bars and their numbers fit 80 columns."""


def count_of(count: int, noun: str) -> str:
    """1 token, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """A length of time in its two largest units: 45s, 12m 5s, 3h 2m, 4d 7h."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count}{unit}" for count, unit in parts[:2])


def milliseconds(seconds: float | None) -> str:
    """Format a short time with its significant digits."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def percent(part: float, whole: float = 1.0) -> str:
    """A share in percent; `NOTHING` where the whole is zero."""
    return f"{part / whole:.1%}" if whole else NOTHING


def bar(share: float, color: str = "green") -> Bar:
    """A share as a bar of at most `_BAR_WIDTH` cells, in eighths of a cell."""
    eighths = _BAR_WIDTH * 8
    return Bar(eighths, 0, round(share * eighths), width=_BAR_WIDTH, color=color)


def grid(facts: Mapping[str, RenderableType]) -> Table:
    """Names in a dim column, and what they stand for."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for fact in facts.items():
        table.add_row(*fact)
    return table


def status_view(status: Status, address: str) -> RenderableType:
    """The screen of `tandem admin status`."""
    head = Text.assemble(
        (f"tandem {status.version}", "bold"),
        f"  {address}  ",
        _state(status.state),
        f"  up {duration(status.uptime_seconds)}",
    )
    facts = {
        "model": status.model or "not known yet",
        "sampling": f"{sampling_words(status.sampling_defaults)} by default",
        "speculation": _speculation(status.speculation_state, f", rule {status.settings.rule}"),
        "load": _load(status.load),
        "throughput": _throughput(status.throughput),
        "acceptance": _acceptance(status.speculation),
        **_ahead(status.speculation),
    }
    return Group(head, "", grid(facts), "", replicas_view(status.replicas), *_decisions(status.decisions))


def sampling_words(defaults: SamplingDefaults) -> str:
    """Defaults in words; without any, OpenAI's."""
    return "temperature 1" if defaults == SamplingDefaults() else str(defaults)


def replicas_view(shown: Sequence[ReplicaSnapshot]) -> RenderableType:
    """A row for each replica, and why some are not ready."""
    reasons = [
        Text(f"{replica.role.value} {replica.address}: {replica.reason}", style="yellow")
        for replica in shown
        if replica.reason
    ]
    return Group(replica_table(shown), *([""] if reasons else []), *reasons)


def replica_table(shown: Sequence[ReplicaSnapshot]) -> RenderableType:
    """A row for each replica."""
    table = plain_table("ROLE", "ADDRESS", "STATE", ">FOR", ">SEQ", ">RTT", ">STEP", ">ACCEPT")
    for replica in shown:
        method = "" if replica.model is None else replica.model.drafting_method
        table.add_row(
            f"{replica.role.value}, {method}" if method else replica.role.value,
            replica.address,
            _state(replica.state),
            duration(replica.since_seconds).partition(" ")[0],
            f"{replica.open_sequences:,}",
            milliseconds(replica.round_trip_seconds),
            milliseconds(replica.step_seconds),
            percent(replica.figures.accepted, replica.figures.drafted),
        )
    return table


def _weights(weights: Weights) -> str:
    return f"version {weights.version}, {weights.fingerprint[:12]}"


def weights_view(by_address: Mapping[str, Weights]) -> RenderableType:
    """A row for each replica that has weights now."""
    table = plain_table("ADDRESS", ">VERSION", "FINGERPRINT")
    for address, weights in by_address.items():
        table.add_row(address, str(weights.version), weights.fingerprint[:12])
    return table


def replica_view(replica: ReplicaSnapshot) -> RenderableType:
    """Everything about one replica and its model."""
    stats = replica.figures
    model = replica.model
    is_ready = replica.state is ReplicaState.READY and not replica.reason
    facts: dict[str, RenderableType] = {
        "role": replica.role.value,
        "address": replica.address,
        "state": _state(replica.state),
        **({} if is_ready else {"reason": replica.reason or NOTHING}),
        "since": duration(replica.since_seconds),
        "sequences": f"{replica.open_sequences:,}",
        "round trip": milliseconds(replica.round_trip_seconds),
        "step": milliseconds(replica.step_seconds),
        "rounds": f"{stats.rounds:,}",
        "proposed": count_of(stats.drafted, "token"),
        "accepted": f"{count_of(stats.accepted, 'token')} ({percent(speculation.acceptance_rate(stats))})",
        "acceptance length": f"{speculation.acceptance_length(stats):.2f}",
        **_ahead(stats),
    }
    if model is not None:
        facts |= {
            "model": model.name or NOTHING,
            "architecture": model.architecture,
            "parameters": f"{model.parameter_count:,}",
            "vocabulary": count_of(model.vocabulary_size, "token"),
            "tokenizer": model.tokenizer_hash[:12] or NOTHING,
            **({} if replica.coverage is None else {"mapping": str(replica.coverage)}),
            "max_length": f"{model.max_length:,}",
            "dtype": model.dtype,
            **({} if model.weights is None else {"weights": _weights(model.weights)}),
            **({"own head": model.drafting_method} if model.drafting_method else {}),
            "version": model.service_version,
        }
    return grid(facts)


def requests_view(shown: Sequence[RequestReport]) -> RenderableType:
    """A row for each request."""
    table = plain_table("ID", ">AGE", ">PROMPT", ">TOKENS", ">TOKENS/S", "RULE", ">K", ">ACCEPTED")
    for report in shown:
        table.add_row(
            report.request_id[:12],
            duration(report.age_seconds),
            f"{report.prompt_tokens:,}",
            f"{report.completion_tokens:,}",
            _speed(report),
            report.rule,
            str(report.num_speculative_tokens),
            percent(report.speculation.accepted, report.speculation.drafted),
        )
    return table


def request_view(report: RequestReport) -> RenderableType:
    """Everything about one request."""
    stats = report.speculation
    return grid(
        {
            "id": report.request_id,
            "age": duration(report.age_seconds),
            "prompt": count_of(report.prompt_tokens, "token"),
            "completion": f"{count_of(report.completion_tokens, 'token')}, {_speed(report)} tokens/s",
            "rule": report.rule,
            "K": f"{count_of(report.num_speculative_tokens, 'token')} proposed per round",
            "target": report.target_address or NOTHING,
            "draft": report.draft_address or NOTHING,
            "speculation": _speculation(report.speculation_state),
            "rounds": f"{stats.rounds:,}",
            "accepted": f"{stats.accepted:,} of {stats.drafted:,} ({percent(stats.accepted, stats.drafted)})",
        }
    )


def stats_view(stats: Stats, before: Stats | None = None) -> RenderableType:
    """Statistics since the start; with an earlier look, also what happened between the two."""
    rounds = count_of(stats.speculation.rounds, "round")
    recent = None if before is None else speculation.since(stats.speculation, before.speculation)
    facts = {
        "up": duration(stats.uptime_seconds),
        "load": _load(stats.load),
        "requests": ", ".join(f"{count:,} {end}" for end, count in asdict(stats.outcomes).items()),
        "throughput": _throughput(stats.throughput),
        "completed": f"{count_of(stats.completion_tokens, 'token')} in {rounds}",
        "speculation": _speculation(stats.speculation_state),
        "acceptance": _acceptance(stats.speculation),
        **_ahead(stats.speculation),
    }
    if recent is not None:
        facts["last look"] = _acceptance(recent) if recent.drafted else "nothing proposed since"
    parts: list[RenderableType] = [grid(facts)]
    if stats.speculation.positions:
        # While nothing happens, show the last activity.
        shown = recent if recent is not None and recent.drafted else stats.speculation
        when = "since the last look" if shown is recent else "since the start"
        parts += ["", _position_table(shown, when)]
        if shown.ahead.awaited:
            parts += ["", _rank_table(shown.ahead, when)]
    if stats.by_rule:
        parts += ["", _rule_table(stats.by_rule)]
    return Group(*parts, *_decisions(stats.decisions))


def options_view(shown: Sequence[ConfigOption]) -> RenderableType:
    """A row for each option of the configuration."""
    table = plain_table("OPTION", "VALUE", "FROM")
    for option in shown:
        value = ",".join(map(str, option.value)) if isinstance(option.value, list) else option.value
        origin = option.origin.value
        if option.origin is Origin.LIVE and option.changed_at is not None:
            origin = f"live at {option.changed_at:%H:%M:%S} by {option.changed_by}"
        table.add_row(option.name, "" if value is None else spell(value), origin)
    return table


def _position_table(counts: SpeculationStats, when: str) -> Table:
    """Cumulative and conditional acceptance at each position of a proposal."""
    table = plain_table("POS", ">CUMULATIVE", "", ">CONDITIONAL", "", title=f"accepted {when}")
    pairs = zip(speculation.cumulative_rates(counts), speculation.conditional_rates(counts), strict=True)
    for number, (cumulative, conditional) in enumerate(pairs, start=1):
        table.add_row(
            str(number), percent(cumulative), bar(cumulative), percent(conditional), bar(conditional, "cyan")
        )
    return table


def _rank_table(ahead: AheadStats, when: str) -> Table:
    """Rounds whose outcome was among the first 1, 2, 4, ... that the draft drafted for: what a smaller budget gives."""
    table = plain_table("OUTCOMES", ">HITS", ">OF ROUNDS", "", title=f"drafted ahead {when}")
    ranks = len(ahead.hits_by_rank)
    for count in (1 << power for power in range(max(ranks - 1, 0).bit_length() + 1)):
        hits = sum(ahead.hits_by_rank[:count])
        table.add_row(str(count), f"{hits:,}", percent(hits, ahead.awaited), bar(hits / ahead.awaited))
    return table


def _rule_table(by_rule: Mapping[str, SpeculationStats]) -> Table:
    """Statistics by acceptance rule. `stats` explains the lengths in its help."""
    table = plain_table("RULE", ">ROUNDS", ">PROPOSED", ">ACCEPTED", ">RATE", ">ACC. LENGTH", ">MEAN LENGTH")
    for rule, counts in by_rule.items():
        table.add_row(
            rule,
            f"{counts.rounds:,}",
            f"{counts.drafted:,}",
            f"{counts.accepted:,}",
            percent(counts.accepted, counts.drafted),
            f"{speculation.acceptance_length(counts):.2f}",
            f"{speculation.mean_acceptance_length(counts):.2f}",
        )
    return table


def _speculation(state: SpeculationState, rule: str = "") -> str:
    if not state.is_on:
        return f"off: {state.explanation}"
    words = f"on, {count_of(state.num_speculative_tokens, 'token')} proposed per round{rule}"
    return f"{words}; {state.explanation}" if state.explanation else words


def _decisions(decisions: Sequence[SpeculationDecision]) -> Iterator[RenderableType]:
    ordered = sorted(decisions, key=lambda each: (each.draft, each.rule, each.temperatures, each.load))
    for draft, decided in groupby(ordered[:_MAX_DECISIONS], key=lambda each: each.draft):
        yield ""
        yield Text(f"proposal length by load, draft {draft}", style="dim")
        for decision in decided:
            yield f"{decision.rule}, temperature {decision.temperatures}, {decision.reason}"
    if len(ordered) > _MAX_DECISIONS:
        yield f"and {len(ordered) - _MAX_DECISIONS} more (-o json)"


def _load(load: Load) -> str:
    return f"{load.running:,} running, {load.queued:,} waiting"


def _throughput(of: Throughput) -> str:
    return f"{of.last_10_seconds:,.1f} tokens/s over 10 s, {of.last_60_seconds:,.1f} over 60 s"


def _acceptance(stats: SpeculationStats) -> str:
    if not stats.drafted:
        return "nothing proposed yet"
    return (
        f"{percent(speculation.acceptance_rate(stats))} of {count_of(stats.drafted, 'proposed token')}, "
        f"acceptance length {speculation.acceptance_length(stats):.2f}"
    )


def _ahead(stats: SpeculationStats) -> dict[str, str]:
    ahead = stats.ahead
    lead = stats.lead
    facts = {}
    if lead.rounds:
        wasted = percent(lead.wasted, stats.rounds + lead.wasted)
        facts["run ahead"] = f"{count_of(lead.rounds, 'round')} begun early; {wasted} of all rounds wasted"
    if ahead.awaited:
        hits = f"{percent(hit_rate(ahead))} of {count_of(ahead.awaited, 'round')}"
        facts["drafted ahead"] = f"{hits}, {ahead.saved_seconds:,.2f} s of waiting saved"
    return facts


def _state(state: ReplicaState | CoordinatorState) -> Text:
    return Text(state.value, style=_STYLES.get(state.value, "red"))


def _speed(report: RequestReport) -> str:
    return f"{report.completion_tokens / report.age_seconds:.1f}" if report.age_seconds > 0 else NOTHING
