"""The figures of `tandem bench`, as JSON, tables and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from operator import truediv
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.contenders import BenchSettings, title_of
from benchmarks.pace import Pace
from benchmarks.pairs import PairInfo
from benchmarks.peers import FIRST_TOKENS, Answer, Outcome


def milliseconds(seconds: float) -> str:
    """Seconds as a table shows them."""
    return f"{seconds * 1000:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1000:.0f} ms"


_SHOWN: Mapping[str, Callable[..., str]] = {
    "": "{}".format,
    "number": "{:g}".format,
    "fraction": "{:.2f}".format,
    "tokens/s": "{:.1f}".format,
    "seconds": milliseconds,
    "share": "{:.1%}".format,
    "ratio": "{:.2f} x".format,
    "bytes": "{:.0f} B".format,
}
"""How a table shows what it measures in each unit."""


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
        return Spread(median=statistics.median(values), low=min(values), high=max(values))


class Cell(Data):
    """One contender on one size of batch at one temperature."""

    contender: str
    batch: int
    temperature: float
    tokens_per_second: tuple[float, ...]
    """Throughput of all requests together, one value for each round."""
    first_tokens_per_second: tuple[float, ...] = ()
    """The same of the first 100 tokens of each request; empty where completions have no more."""
    later_tokens_per_second: tuple[float, ...] = ()
    """The same of the tokens behind those."""
    first_token_seconds: Spread
    """Over the requests of all rounds."""
    inter_token_seconds_p50: float
    """Seconds between a token and the next; tokens of one chunk share its time."""
    inter_token_seconds_p99: float
    acceptance_rate: float | None = None
    """Accepted of the proposed tokens; None where that is not known."""
    tokens_per_pass: float | None = None
    """Tokens for each pass of the target; None where that is not known."""
    led: float | None = None
    """Share of the rounds that the target had begun before it was asked; None where that is not known."""
    wasted: float | None = None
    """Rounds that it had begun in vain, by all that it computed."""
    paced: tuple[float, ...] | None = None
    """Of the paced target, see `steps_between`; None where there is none."""
    same_tokens: float | None = None
    """Share of tokens, up to the first that differs, that equal those of the target alone; None above temperature 0."""

    @property
    def speed(self) -> Spread:
        return Spread.of(self.tokens_per_second)


Column = tuple[str, str]
"""Its name, and the unit of its values: one of `_SHOWN`."""
Row = tuple[str | float | None, ...]
"""None is shown as nothing."""


class Table(Data):
    """Figures of one kind."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @staticmethod
    def of(title: str, rows: Iterable[Row], *columns: Column) -> Table:
        return Table(title=title, columns=columns, rows=tuple(rows))

    def texts(self) -> list[list[str]]:
        shown = [_SHOWN[unit] for _, unit in self.columns]
        return [
            ["" if value is None else show(value) for show, value in zip(shown, row, strict=True)]
            for row in self.rows
        ]


class Machine(Data):
    """Machine of the measurement."""

    processor: str
    cores: int
    device: str
    gpus: tuple[str, ...] = ()
    """The lines of nvidia-smi about each."""
    load_before: float
    """Processes that ran or waited for a core in the minute before: near 0 on a quiet machine."""
    versions: dict[str, str]


class Report(Data):
    """All figures of a run."""

    version: Literal[1] = 1
    taken_at: str
    """Day and time, UTC."""
    command: str
    machine: Machine
    pair: PairInfo
    settings: BenchSettings
    cells: tuple[Cell, ...]
    tables: tuple[Table, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    """Contenders that did not take part, or failed, and why."""

    def cell(self, contender: str, batch: int, temperature: float) -> Cell | None:
        wanted = (contender, batch, temperature)
        return next((c for c in self.cells if (c.contender, c.batch, c.temperature) == wanted), None)


def cell_of(
    contender: str, batch: int, temperature: float, outcomes: Sequence[Outcome], references: Sequence[Outcome]
) -> Cell:
    """Statistics of one contender's rounds, beside those of the target alone where it took part."""
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    gaps = [gap for answer in answers for gap in inter_token_seconds(answer)] or [0.0]
    p50, p99 = map(float, np.percentile(gaps, (50, 99)))
    paced = list(filter(None, map(steps_between, outcomes)))
    rounds, drafted, accepted, led, wasted = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("rounds", "drafted", "accepted", "led", "wasted")
    )
    tokens = sum(outcome.token_count for outcome in outcomes)
    is_long = all(len(answer.token_ids) > FIRST_TOKENS for answer in answers)
    first, later = (
        tuple(outcome.speed_between(*part) for outcome in outcomes if is_long)
        for part in ((0, FIRST_TOKENS), (FIRST_TOKENS, tokens))
    )
    return Cell(
        contender=contender,
        batch=batch,
        temperature=temperature,
        tokens_per_second=tuple(outcome.tokens_per_second for outcome in outcomes),
        first_tokens_per_second=first,
        later_tokens_per_second=later,
        first_token_seconds=Spread.of([answer.arrivals[0][0] for answer in answers]),
        inter_token_seconds_p50=p50,
        inter_token_seconds_p99=p99,
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_pass=tokens / rounds if rounds else None,
        led=led / rounds if led else None,
        wasted=wasted / (rounds + wasted) if led else None,
        paced=tuple(map(float, np.median(paced, axis=0))) if paced else None,
        same_tokens=_same_tokens(outcomes, references) if temperature == 0 else None,
    )


def inter_token_seconds(answer: Answer) -> list[float]:
    """For each token after the first piece, the time since the token before it."""
    gaps: list[float] = []
    for (before, _), (seconds, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
        gaps += [(seconds - before) / count] * count
    return gaps


def steps_between(outcome: Outcome) -> tuple[float, float, float] | None:
    """Steps of the target while all sequences are decoded: how many for each token of a sequence, tokens of a sequence
    per second, and the median of the seconds in which neither it nor its head works; None where there are no two."""
    first = max(answer.arrivals[0][0] for answer in outcome.answers)
    last = min(answer.arrivals[-1][0] for answer in outcome.answers)
    arrivals = chain.from_iterable(answer.arrivals for answer in outcome.answers)
    tokens = sum(count for seconds, count in arrivals if first < seconds <= last) / len(outcome.answers)
    steps = sorted(step for step in outcome.steps if first < step.ended <= last)
    of_target = sum(step.is_of_target for step in steps)
    if not tokens or of_target < 2:
        return None
    gap = statistics.median(later.began - sooner.ended for sooner, later in pairwise(steps))
    return of_target / tokens, tokens / (last - first), gap


def _same_tokens(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> float | None:
    same = total = 0
    for outcome, reference in zip(outcomes, references, strict=False):
        for answer, other in zip(outcome.answers, reference.answers, strict=True):
            pairs = enumerate(zip_longest(answer.token_ids, other.token_ids))
            same += next((index for index, (a, b) in pairs if a != b), len(other.token_ids))
            total += len(other.token_ids)
    return same / total if total else None


# ---- tables


def tables(report: Report) -> list[Table]:
    """All tables of a report that have rows."""
    by_cell = _first_tokens(report), _leads(report), _paced_steps(report)
    every = (*_speeds(report), *by_cell, *report.tables)
    return [table for table in every if table.rows]


def show(console: Console, report: Report) -> None:
    """Print the report."""
    console.print(Markdown(markdown(report)))


def markdown(report: Report) -> str:
    """The whole report as a Markdown document."""
    parts = [f"# Benchmark: {report.pair.name}", *_circumstances(report)]
    parts += map(markdown_table, tables(report))
    parts += [f"- {title_of(name)}: {why}" for name, why in report.absent.items()]
    return "\n\n".join(parts) + "\n"


def write(report: Report, json: Path | None, markdown_file: Path | None) -> None:
    """Write the files that are asked for."""
    files = {json: report.model_dump_json(indent=1) + "\n", markdown_file: markdown(report)}
    for file, text in files.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def _circumstances(report: Report) -> Iterator[str]:
    machine = report.machine
    pair = report.pair
    settings = report.settings
    yield f"    {report.command}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield (
        f"{report.taken_at}; {machine.cores} cores of {machine.processor}, {machine.device}; load before "
        f"{machine.load_before:g}; {versions}. {settings.dtype}, {settings.threads} threads for each model, "
        f"{settings.max_tokens} tokens for each completion, K = {settings.num_speculative_tokens}, medians of "
        f"{settings.rounds} rounds."
    )
    sizes = f"Target: {pair.target_parameters / 1e6:.4g} million parameters; draft: {pair.draft_parameters / 1e6:.4g}."
    if pair.agreement is not None:
        sizes += (
            f" Both have the same most probable token {pair.agreement:.1%} of the time; at temperature 1 they"
        )
        sizes += f" share {pair.overlap or 0.0:.1%} of their probability."
    yield sizes
    yield from machine.gpus
    if settings.note:
        yield settings.note


def _speeds(report: Report) -> Iterator[Table]:
    columns = {
        "contender": "", "tokens/s": "tokens/s", "low to high": "",
        "by target alone": "ratio", "first token": "seconds", "p50": "seconds", "p99": "seconds",
        "acceptance": "share", "tokens/pass": "fraction", "same text": "share",
    }  # fmt: skip
    for batch, temperature in dict.fromkeys((cell.batch, cell.temperature) for cell in report.cells):
        alone = report.cell("target-alone", batch, temperature)
        rows = tuple(
            (
                title_of(name),
                cell.speed.median,
                f"{cell.speed.low:.1f} to {cell.speed.high:.1f}",
                None if alone is None else cell.speed.median / alone.speed.median,
                cell.first_token_seconds.median,
                *(cell.inter_token_seconds_p50, cell.inter_token_seconds_p99),
                *(cell.acceptance_rate, cell.tokens_per_pass, cell.same_tokens),
            )
            for name in report.settings.contenders
            if (cell := report.cell(name, batch, temperature)) is not None
        )
        title = f"Batch {batch}, temperature {temperature:g}"
        yield Table.of(title, rows, *columns.items())


def _of_cells(title: str, rows: Iterable[tuple[Cell, Sequence[float | None]]], *columns: Column) -> Table:
    return Table.of(
        title,
        ((title_of(cell.contender), cell.batch, cell.temperature, *figures) for cell, figures in rows),
        *(("contender", ""), ("batch", "number"), ("temperature", "number"), *columns),
    )


def _first_tokens(report: Report) -> Table:
    """Speeds of the first tokens, while a coordinator that has just started learns, apart from those of the rest."""
    rows: list[tuple[Cell, list[float | None]]] = []
    for cell in report.cells:
        place = cell.batch, cell.temperature
        alone = report.cell("target-alone", *place)
        others = [
            each for each in report.cells if each is not cell and (each.batch, each.temperature) == place
        ]
        figures: list[float | None] = []
        for part in ("first_tokens_per_second", "later_tokens_per_second"):
            if own := getattr(cell, part):
                speed = statistics.median(own)
                speed_alone = getattr(alone, part, ())
                figures += [speed, speed / statistics.median(speed_alone) if speed_alone else None]
                figures.append(by_best(own, [getattr(other, part) for other in others]))
        if figures:
            rows.append((cell, figures))
    ratios = ("by target alone", "ratio"), ("by the best other", "ratio")
    columns = ("first", "tokens/s"), *ratios, ("rest", "tokens/s"), *ratios
    return _of_cells(f"The first {FIRST_TOKENS} tokens, and the rest", rows, *columns)


def by_best(own: Sequence[float], others: Iterable[Sequence[float]]) -> float | None:
    """Speed over that of the fastest other contender: the geometric mean of the runs.

    For each run it is the one that is fastest in all other runs: the best of noisy figures is above each of them. None
    for fewer than three runs.
    """
    rivals = [speeds for speeds in others if len(speeds) == len(own)]
    if len(own) < 3 or not rivals:
        return None
    fastest = [max((sum(each) - each[run], each[run]) for each in rivals)[1] for run in range(len(own))]
    return statistics.geometric_mean(map(truediv, own, fastest))


def _leads(report: Report) -> Table:
    rows = ((cell, (cell.led, cell.wasted)) for cell in report.cells if cell.led is not None)
    shares = ("begun early", "share"), ("in vain", "share")
    return _of_cells("Rounds that the target began by itself", rows, *shares)


def _paced_steps(report: Report) -> Table:
    """The target's steps, of which each takes as long whatever its size: one for all sequences is what a token of the
    target alone should cost, and the time between two steps is lost."""
    rows: list[tuple[Cell, Sequence[float]]] = []
    for cell in report.cells:
        if cell.paced is not None:
            steps, rate, gap = cell.paced
            rows.append((cell, (steps, rate * Pace.from_text(report.settings.pace).verify_seconds, gap)))
    columns = ("steps per token", "fraction"), ("speed by one token a step", "fraction")
    return _of_cells("Steps of the paced target", rows, *columns, ("between steps", "seconds"))


def markdown_table(table: Table) -> str:
    """A table as Markdown, under its title."""
    names = [name for name, _ in table.columns]
    marks = ["---:" if index else "---" for index in range(len(names))]
    lines = [" | ".join(row) for row in (names, marks, *table.texts())]
    return "\n".join([f"## {table.title}", "", *(f"| {line} |" for line in lines)])
