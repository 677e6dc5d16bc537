"""Everything that `tandem bench` finds, as JSON, tables, Markdown and a chart.

python -m benchmarks.report benchmarks/results/bench_*.json    # write tables and charts again, beside the reports
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.peers import Answer, Outcome

FIRST_TOKENS = 100
"""Tokens of a completion that are reported apart: a coordinator that has just started learns while they are written."""


class Data(BaseModel):
    """Plain data, with a sentence about each field in its JSON schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Spread(Data):
    """A figure over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return Spread(median=statistics.median(values), low=min(values), high=max(values))


class Cell(Data):
    """One contender on one size of batch at one temperature."""

    contender: str
    batch: int
    temperature: float
    tokens_per_second: tuple[float, ...]
    """Throughput of all requests together, one value for each round."""
    first_token_seconds: Spread
    """Over the requests of all rounds."""
    inter_token_seconds_p50: float
    """Seconds between a token and the next; tokens of one chunk share its time."""
    inter_token_seconds_p99: float
    acceptance_rate: float | None = None
    """Accepted of the proposed tokens; None where that is not known."""
    tokens_per_pass: float | None = None
    """Tokens for each pass of the target; None where that is not known."""
    same_tokens: float | None = None
    """Share of tokens, up to the first that differs, that equal those of the target alone; None above temperature 0."""
    early_tokens_per_second: tuple[float, ...] = ()
    """Throughput of the first 100 tokens of each request, added up, by round; empty where no request has more."""
    late_tokens_per_second: tuple[float, ...] = ()
    """The same of the tokens after them."""

    @property
    def speed(self) -> Spread:
        """Tokens per second over the rounds."""
        return Spread.of(self.tokens_per_second)


class PhaseRow(Data):
    """Phases of a round: medians over rounds, in seconds."""

    path: Literal["services", "one process"]
    batch: int
    temperature: float
    draft: float
    """From asking for a proposal to having it."""
    verify: float
    """From asking for a verification to having it."""
    sampling: float
    """Seconds of the acceptance rule."""
    wait: float
    """Between an acceptance and the next proposal: committing, text, and handing the piece on."""

    @property
    def round(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.sampling + self.wait


class WireBytes(Data):
    """Bytes on the wire for each token of a completion, HTTP/2 and TCP payload, both directions."""

    temperature: float
    draft: float
    """Between coordinator and draft service."""
    target: float
    """Between coordinator and target service."""


class PrefixGain(Data):
    """Time to first token of a prompt whose first tokens were served before."""

    prefix_tokens: int
    first_seconds: Spread
    """The first time."""
    again_seconds: Spread
    """The same path with another suffix."""
    ratio: float
    """Median over rounds of the second by the first."""


class Target(Data):
    """A goal of the benchmark."""

    name: str
    needed: str
    reached: float | None
    """None when this run did not measure it."""
    is_met: bool | None


class PairInfo(Data):
    """The models."""

    name: str
    target_parameters: int
    draft_parameters: int
    agreement: float | None = None
    """Share of positions with the same most probable token, measured when a shaped pair was made."""
    overlap: float | None = None
    """Likewise: the probability that they share at temperature 1."""


class Machine(Data):
    """Machine of the measurement."""

    processor: str
    cores: int
    device: str
    load_before: float
    """Processes that ran or waited for a core in the minute before: near 0 on a quiet machine."""
    versions: dict[str, str]


class Report(Data):
    """Everything that a run found."""

    version: Literal[1] = 1
    taken_at: str
    """Day and time, UTC."""
    command: str
    note: str = ""
    machine: Machine
    pair: PairInfo
    dtype: str
    threads: int
    """CPU threads of each model."""
    max_tokens: int
    num_speculative_tokens: int
    rounds: int
    titles: dict[str, str]
    """Display name of each contender, in the order of the tables."""
    cells: tuple[Cell, ...]
    phases: tuple[PhaseRow, ...] = ()
    wire: tuple[WireBytes, ...] = ()
    prefix: PrefixGain | None = None
    targets: tuple[Target, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    """Contenders that did not take part, or failed, and why."""

    def cell(self, contender: str, batch: int, temperature: float) -> Cell | None:
        """One cell; None when it was not measured."""
        wanted = (contender, batch, temperature)
        return next((c for c in self.cells if (c.contender, c.batch, c.temperature) == wanted), None)

    @staticmethod
    def read(file: Path) -> Report:
        """From a JSON file."""
        return Report.model_validate_json(file.read_text(encoding="utf-8"))


def cell_of(
    contender: str,
    batch: int,
    temperature: float,
    outcomes: Sequence[Outcome],
    references: Sequence[Outcome | None],
) -> Cell:
    """Statistics of one contender's rounds.

    Args:
        contender: its name.
        batch: requests at once.
        temperature: of all of them.
        outcomes: one for each round.
        references: outcomes of the target alone in the same rounds, where it took part.
    """
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    gaps = sorted(gap for answer in answers for gap in inter_token_seconds(answer))
    rounds, drafted, accepted = (
        sum(getattr(outcome, name) for outcome in outcomes) for name in ("rounds", "drafted", "accepted")
    )
    tokens = sum(outcome.token_count for outcome in outcomes)
    return Cell(
        contender=contender,
        batch=batch,
        temperature=temperature,
        tokens_per_second=tuple(outcome.tokens_per_second for outcome in outcomes),
        first_token_seconds=Spread.of([answer.arrivals[0][0] for answer in answers]),
        inter_token_seconds_p50=quantile(gaps, 0.5),
        inter_token_seconds_p99=quantile(gaps, 0.99),
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_pass=tokens / rounds if rounds else None,
        same_tokens=_same_tokens(outcomes, references) if temperature == 0 else None,
        early_tokens_per_second=tuple(_parts(outcome)[0] for outcome in outcomes if _parts(outcome)),
        late_tokens_per_second=tuple(_parts(outcome)[1] for outcome in outcomes if _parts(outcome)),
    )


def _parts(outcome: Outcome) -> tuple[float, ...]:
    """Tokens per second of the first `FIRST_TOKENS` tokens and of the others; nothing where a request has no others."""
    early = late = 0.0
    for answer in outcome.answers:
        counts = accumulate(new for _, new in answer.arrivals)
        count, reached = next(
            (found for found in zip(counts, answer.arrivals, strict=True) if found[0] >= FIRST_TOKENS),
            (0, (0.0, 0)),
        )
        others = len(answer.token_ids) - count
        if not count or not others:
            return ()
        early += count / reached[0]
        late += others / (answer.arrivals[-1][0] - reached[0])
    return early, late


def inter_token_seconds(answer: Answer) -> list[float]:
    """For each token after the first piece, the time since the token before it."""
    gaps: list[float] = []
    for (before, _), (seconds, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
        gaps += [(seconds - before) / count] * count
    return gaps


def quantile(ascending: Sequence[float], share: float) -> float:
    """The lowest value that this share of the values does not exceed; 0 without values."""
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _same_tokens(outcomes: Sequence[Outcome], references: Sequence[Outcome | None]) -> float | None:
    same = total = 0
    for outcome, reference in zip(outcomes, references, strict=True):
        if reference is None:
            continue
        for answer, other in zip(outcome.answers, reference.answers, strict=True):
            pairs = zip(answer.token_ids, other.token_ids, strict=False)
            length = len(other.token_ids)
            same += next((index for index, (a, b) in enumerate(pairs) if a != b), length)
            total += length
    return same / total if total else None


# ---- goals

_VLLM = ("vllm", "vllm-ngram", "vllm-draft")
_ASSISTED = ("assisted", "assisted-defaults")
_Side = tuple[str, int]
"""A contender, and its batch."""


def with_targets(report: Report) -> Report:
    """The report with each goal, whether measured or not. Ratios are medians of those within a round."""
    one, many, alone = ("speculative", 1), ("speculative", 16), ("target-alone", 16)
    split = "speculative through the services, by the same loop in one process"
    goals = [
        *(
            (f"{split}: batch 1, temperature {t:g}", 0.9, _ratio(report, one, t, ("one-process", 1)))
            for t in (0.0, 1.0)
        ),
        (
            "speculative, by the better of transformers' assisted generations: batch 1, temperature 0",
            1.5,
            _ratio(report, one, 0.0, *((name, 1) for name in _ASSISTED)),
        ),
        (
            "speculative, by transformers generate: batch 1, temperature 0",
            2.0,
            _ratio(report, one, 0.0, ("transformers", 1)),
        ),
        (
            "speculative, by the best mode of vLLM: batch 1, temperature 0",
            1.0,
            _ratio(report, one, 0.0, *((name, 1) for name in _VLLM)),
        ),
        *(
            (
                f"speculative, by the target alone: batch 16, temperature {t:g}",
                1.0,
                _ratio(report, many, t, alone),
            )
            for t in (0.0, 1.0)
        ),
        (
            "the target alone at batch 16, by itself at batch 1: temperature 0",
            6.0,
            _ratio(report, alone, 0.0, ("target-alone", 1)),
        ),
    ]
    targets = [
        Target(
            name=name,
            needed=f"at least {needed:g}",
            reached=reached,
            is_met=None if reached is None else reached >= needed,
        )
        for name, needed, reached in goals
    ]
    prefix = None if report.prefix is None else report.prefix.ratio
    targets.append(
        Target(
            name="time to first token when the first 512 tokens were served before, by the first time",
            needed="at most 0.25",
            reached=prefix,
            is_met=None if prefix is None else prefix <= 0.25,
        )
    )
    return report.model_copy(update={"targets": tuple(targets)})


def _ratio(report: Report, one: _Side, temperature: float, *others: _Side) -> float | None:
    """Tokens per second by those of the fastest of others; None where they were not measured."""
    own, *found = (report.cell(name, batch, temperature) for name, batch in (one, *others))
    if own is None:
        return None
    ratios = [
        statistics.median(a / b for a, b in zip(own.tokens_per_second, cell.tokens_per_second, strict=True))
        for cell in found
        if cell is not None
    ]
    return min(ratios, default=None)


# ---- tables


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
    for sheet in (
        *_speeds(report),
        _parts_sheet(report),
        _phases(report),
        _wire(report),
        _prefix(report),
        _targets(report),
    ):
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


def _parts_sheet(report: Report) -> Sheet:
    columns = (
        "contender",
        "batch",
        "temperature",
        "first tokens/s",
        "by target alone",
        "later tokens/s",
        "by target alone",
    )
    rows = []
    for cell in report.cells:
        alone = report.cell("target-alone", cell.batch, cell.temperature)
        figures = []
        for name in ("early_tokens_per_second", "late_tokens_per_second"):
            own, base = getattr(cell, name), getattr(alone, name, ())
            if own:
                figures.append(f"{statistics.median(own):.1f}")
                ratios = [a / b for a, b in zip(own, base, strict=False)]
                figures.append(f"{statistics.median(ratios):.2f} x" if ratios else "")
        if figures:
            rows.append((report.titles[cell.contender], str(cell.batch), f"{cell.temperature:g}", *figures))
    return Sheet(f"The first {FIRST_TOKENS} tokens of each completion, and the others", columns, tuple(rows))


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


# ---- a chart

_WIDTH, _LEFT, _RIGHT = 760, 240, 120
_BAR, _GAP = 16, 6
_OURS = ("target-alone", "speculative", "one-process")


def svg(report: Report) -> str:
    """Tokens per second as an SVG document, on white: a panel for each batch and temperature."""
    body: list[str] = []
    top = 52
    for batch, temperature in dict.fromkeys((cell.batch, cell.temperature) for cell in report.cells):
        found = (report.cell(name, batch, temperature) for name in report.titles)
        cells = [cell for cell in found if cell is not None]
        body.append(_text(16, top + 18, f"batch {batch}, temperature {temperature:g}", weight=600))
        scale = (_WIDTH - _LEFT - _RIGHT) / max(cell.speed.high for cell in cells)
        for index, cell in enumerate(cells):
            body += _bar(report.titles[cell.contender], cell, scale, top + 34 + index * (_BAR + _GAP))
        top += 34 + len(cells) * (_BAR + _GAP) + 14
    title = f"Tokens per second, {report.pair.name} pair, {report.dtype}, K = {report.num_speculative_tokens}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" '
            f'height="{top}" font-family="system-ui, sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>',
            _text(16, 28, title, size=15, weight=600),
            *body,
            "</svg>",
            "",
        ]
    )


def _bar(title: str, cell: Cell, scale: float, y: int) -> Iterator[str]:
    """A contender's median, and a line from the lowest to the highest."""
    colour = "#0f766e" if cell.contender in _OURS else "#94a3b8"
    low, high, middle = _LEFT + cell.speed.low * scale, _LEFT + cell.speed.high * scale, y + _BAR / 2
    yield _text(_LEFT - 8, y + 12, title, anchor="end")
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{cell.speed.median * scale:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>'
    )
    yield (
        f'<path d="M{low:.1f} {middle} H{high:.1f} M{low:.1f} {middle - 4} v8 M{high:.1f} {middle - 4} v8" '
        'stroke="#0f172a" stroke-width="1" fill="none"/>'
    )
    yield _text(high + 6, y + 12, f"{cell.speed.median:.0f}", colour="#64748b")


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    colour: str = "#0f172a",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )


# ---- files


def write(report: Report, json: Path | None, svg_file: Path | None, markdown_file: Path | None) -> None:
    """Write the files that are asked for."""
    chart = None if svg_file is None else svg_file.name
    files = {
        json: report.model_dump_json(indent=1) + "\n",
        svg_file: svg(report),
        markdown_file: markdown(report, chart),
    }
    for file, text in files.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def render(files: Sequence[Path]) -> None:
    """Write the chart and the tables of reports again, beside their JSON files."""
    for file in files:
        write(with_targets(Report.read(file)), None, file.with_suffix(".svg"), file.with_suffix(".md"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, help="reports that `tandem bench --json` wrote")
    render(parser.parse_args().reports)
