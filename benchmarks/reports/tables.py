"""A report as tables, for a terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.reports.report import Cell, PhaseRow, Report, Spread


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table before it has a form."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    """How many columns, from the left, hold words; the others hold figures."""


def sheets(report: Report) -> Iterator[Sheet]:
    """All tables of a report that have rows."""
    for sheet in (*_speeds(report), _phases(report), _wire(report), _prefix(report), _targets(report)):
        if sheet.rows:
            yield sheet


def show(console: Console, report: Report) -> None:
    """Print it."""
    console.print(Group(*map(_rich, sheets(report)), *_absent(report)))


def markdown(report: Report, chart: str | None = None) -> str:
    """The whole report as a Markdown document."""
    parts = [f"# Benchmark: {report.pair.name}", *_circumstances(report)]
    if chart is not None:
        parts.append(f"![Tokens per second by contender]({chart})")
    parts += [_markdown_table(sheet) for sheet in sheets(report)]
    parts += [f"- {text.plain}" for text in _absent(report)]
    return "\n\n".join(parts) + "\n"


def _circumstances(report: Report) -> Iterator[str]:
    machine, pair = report.machine, report.pair
    yield f"    {report.command}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield (
        f"{report.taken_at}; {machine.cores} cores of {machine.processor}, {machine.device}; load before "
        f"{machine.load_before:g}; {versions}. {report.dtype}, {report.threads} threads for each model, "
        f"{report.max_tokens} tokens for each completion, K = {report.num_speculative_tokens}, medians of "
        f"{report.rounds} rounds."
    )
    made = (
        ""
        if pair.agreement is None
        else f" Made so that both have the same most probable token {pair.agreement:.1%} of the time; "
        f"at temperature 1 they share {pair.overlap or 0.0:.1%} of their probability."
    )
    yield f"Target: {_count(pair.target_parameters)} parameters; draft: {_count(pair.draft_parameters)}.{made}"
    if report.note:
        yield report.note


def _speeds(report: Report) -> Iterator[Sheet]:
    columns = (
        "contender", "tokens/s", "low to high", "by target alone", "first token", "p50", "p99", "acceptance",
        "tokens/pass", "same text",
    )  # fmt: skip
    keys = dict.fromkeys((cell.batch, cell.temperature) for cell in report.cells)
    for batch, temperature in keys:
        cells = [report.cell(name, batch, temperature) for name in report.titles]
        alone = report.cell("target-alone", batch, temperature)
        rows = tuple(
            (report.titles[cell.contender], *_speed_cells(cell, alone)) for cell in cells if cell is not None
        )
        yield Sheet(f"Batch {batch}, temperature {temperature:g}", columns, rows)


def _speed_cells(cell: Cell, alone: Cell | None) -> Iterator[str]:
    yield f"{cell.speed.median:.1f}"
    yield f"{cell.speed.low:.1f} to {cell.speed.high:.1f}"
    yield "" if alone is None else f"{cell.speed.median / alone.speed.median:.2f} x"
    yield _milliseconds(cell.first_token_seconds.median)
    yield _milliseconds(cell.inter_token_seconds_p50)
    yield _milliseconds(cell.inter_token_seconds_p99)
    yield _share(cell.acceptance_rate)
    yield "" if cell.tokens_per_pass is None else f"{cell.tokens_per_pass:.2f}"
    yield _share(cell.same_tokens)


def _phases(report: Report) -> Sheet:
    rows = tuple(
        (
            row.path,
            str(row.batch),
            f"{row.temperature:g}",
            *map(_milliseconds, (row.draft, row.verify, row.sampling, row.wait, row.round)),
            _wire_seconds(report, row),
        )
        for row in report.phases
    )
    columns = ("path", "batch", "temperature", "draft", "verify", "sampling", "wait", "round", "of it wire")
    return Sheet("A round by phase, medians", columns, rows)


def _wire_seconds(report: Report, row: PhaseRow) -> str:
    """Extra time of a round through the services over one with the same engines in one process."""
    others = (other for other in report.phases if other.path == "one process" != row.path)
    here = [o for o in others if (o.batch, o.temperature) == (row.batch, row.temperature)]
    return _milliseconds(row.draft + row.verify - here[0].draft - here[0].verify) if here else ""


def _wire(report: Report) -> Sheet:
    rows = tuple((f"{row.temperature:g}", f"{row.draft:.0f} B", f"{row.target:.0f} B") for row in report.wire)
    return Sheet("On the wire, for each token", ("temperature", "draft service", "target service"), rows)


def _prefix(report: Report) -> Sheet:
    gain = report.prefix
    rows = (
        ()
        if gain is None
        else (
            ("the first time", *_spread(gain.first_seconds), ""),
            ("again", *_spread(gain.again_seconds), f"{gain.ratio:.2f} x"),
        )
    )
    title = f"Time to first token, {0 if gain is None else gain.prefix_tokens} tokens of prefix"
    return Sheet(title, ("prefix", "median", "low to high", "by the first"), rows)


def _targets(report: Report) -> Sheet:
    verdicts = {True: "met", False: "not met", None: "not measured"}
    rows = tuple(
        (one.name, one.needed, "" if one.reached is None else f"{one.reached:.2f}", verdicts[one.is_met])
        for one in report.targets
    )
    return Sheet("To be reached", ("what", "needed", "reached", ""), rows)


def _absent(report: Report) -> list[Text]:
    return [Text(f"{report.titles.get(name, name)}: {why}") for name, why in report.absent.items()]


def _rich(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left")
    for index, name in enumerate(sheet.columns):
        justify = "left" if index < sheet.text_columns else "right"
        # Figures stay whole; only sentences may be broken.
        table.add_column(name, justify=justify, no_wrap=index >= sheet.text_columns)  # type: ignore[arg-type]
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _markdown_table(sheet: Sheet) -> str:
    marks = ["---" if index < sheet.text_columns else "---:" for index in range(len(sheet.columns))]
    lines = [" | ".join(row) for row in (sheet.columns, marks, *sheet.rows)]
    return "\n".join([f"## {sheet.title}", "", *(f"| {line} |" for line in lines)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1000:.0f} ms"


def _spread(spread: Spread) -> tuple[str, str]:
    low_to_high = f"{_milliseconds(spread.low)} to {_milliseconds(spread.high)}"
    return _milliseconds(spread.median), low_to_high


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _count(parameters: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
