"""The figures of `tandem bench`, as JSON, tables and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.peers import Answer, Outcome


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

    @property
    def speed(self) -> Spread:
        """Tokens per second over the rounds."""
        return Spread.of(self.tokens_per_second)


class PhaseRow(Data):
    """Phases of a round: means over rounds, in seconds."""

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
        """Sum of the phases."""
        return self.draft + self.verify + self.sampling + self.wait


class WireBytes(Data):
    """Bytes of messages for each token of a completion, both directions."""

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
    """The same prefix with another ending."""
    ratio: float
    """Median over rounds of the second by the first."""


class StepRow(Data):
    """A step of one model's engine. Milliseconds, medians."""

    model: Literal["target", "draft"]
    sequences: int
    width: int
    """Tokens of each sequence."""
    torch: float | None
    """By the model's own modules; None where the engine runs those."""
    served: float
    """As a service runs it."""
    weights: float
    """Time to read the weights once, at the measured rate."""


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
    """All figures of a run."""

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
    steps: tuple[StepRow, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    """Contenders that did not take part, or failed, and why."""

    def cell(self, contender: str, batch: int, temperature: float) -> Cell | None:
        """One cell; None when it was not measured."""
        wanted = (contender, batch, temperature)
        return next((c for c in self.cells if (c.contender, c.batch, c.temperature) == wanted), None)


def cell_of(
    contender: str, batch: int, temperature: float, outcomes: Sequence[Outcome], references: Sequence[Outcome]
) -> Cell:
    """Statistics of one contender's rounds.

    Args:
        outcomes: One for each round.
        references: Outcomes of the target alone in the same rounds, where it took part.
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
        inter_token_seconds_p50=_quantile(gaps, 0.5),
        inter_token_seconds_p99=_quantile(gaps, 0.99),
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_pass=tokens / rounds if rounds else None,
        same_tokens=_same_tokens(outcomes, references) if temperature == 0 else None,
    )


def inter_token_seconds(answer: Answer) -> list[float]:
    """For each token after the first piece, the time since the token before it."""
    gaps: list[float] = []
    for (before, _), (seconds, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
        gaps += [(seconds - before) / count] * count
    return gaps


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else 0.0


def _same_tokens(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> float | None:
    same = total = 0
    for outcome, reference in zip(outcomes, references, strict=False):
        for answer, other in zip(outcome.answers, reference.answers, strict=True):
            pairs = enumerate(zip_longest(answer.token_ids, other.token_ids))
            same += next((index for index, (a, b) in pairs if a != b), len(other.token_ids))
            total += len(other.token_ids)
    return same / total if total else None


# ---- tables


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table before it has a form."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(report: Report) -> Iterator[Sheet]:
    """All tables of a report that have rows."""
    tables = (_phases, _wire, _prefix, _steps, _goals)
    yield from _speeds(report)
    yield from (sheet for sheet in (table(report) for table in tables) if sheet.rows)


def show(console: Console, report: Report) -> None:
    """Print the tables, and the contenders that are absent."""
    console.print(Group(*map(_rich, sheets(report)), *map(Text, _absent(report))))


def markdown(report: Report) -> str:
    """The whole report as a Markdown document."""
    parts = [f"# Benchmark: {report.pair.name}", *_circumstances(report)]
    parts += [markdown_table(sheet) for sheet in sheets(report)]
    parts += [f"- {line}" for line in _absent(report)]
    return "\n\n".join(parts) + "\n"


def write(report: Report, json: Path | None, markdown_file: Path | None) -> None:
    """Write the files that are asked for."""
    files = {json: report.model_dump_json(indent=1) + "\n", markdown_file: markdown(report)}
    for file, text in files.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


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
    sizes = f"Target: {pair.target_parameters / 1e6:.4g} million parameters; draft: {pair.draft_parameters / 1e6:.4g}."
    if pair.agreement is not None:
        sizes += (
            f" Both have the same most probable token {pair.agreement:.1%} of the time; at temperature 1 they"
        )
        sizes += f" share {pair.overlap or 0.0:.1%} of their probability."
    yield sizes
    if report.note:
        yield report.note


def _speeds(report: Report) -> Iterator[Sheet]:
    columns = (
        "contender", "tokens/s", "low to high", "by target alone", "first token", "p50", "p99", "acceptance",
        "tokens/pass", "same text",
    )  # fmt: skip
    for batch, temperature in dict.fromkeys((cell.batch, cell.temperature) for cell in report.cells):
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
    return Sheet("A round by phase, means", columns, rows)


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
    rows: tuple[tuple[str, ...], ...] = ()
    if gain is not None:
        rows = (
            ("the first time", *_spread(gain.first_seconds), ""),
            ("again", *_spread(gain.again_seconds), f"{gain.ratio:.2f} x"),
        )
    title = f"Time to first token, {0 if gain is None else gain.prefix_tokens} tokens of prefix"
    return Sheet(title, ("prefix", "median", "low to high", "by the first"), rows)


def _steps(report: Report) -> Sheet:
    rows = tuple(
        (
            f"{row.model}, {row.sequences} x {row.width}",
            "" if row.torch is None else f"{row.torch:.2f} ms",
            f"{row.served:.2f} ms",
            f"{row.weights:.2f} ms",
            "" if row.torch is None else f"{row.torch / row.served:.2f} x",
        )
        for row in report.steps
    )
    columns = ("step: sequences x tokens", "torch", "as served", "weights read once", "torch by served")
    return Sheet("Steps of the engine, medians", columns, rows)


Side = tuple[str, int]
"""A contender, and its batch."""
_GOALS: tuple[tuple[Side, float, tuple[Side, ...], float], ...] = (
    (("speculative", 1), 0.0, (("one-process", 1),), 0.9),
    (("speculative", 1), 1.0, (("one-process", 1),), 0.9),
    (("speculative", 1), 0.0, (("assisted", 1), ("assisted-defaults", 1)), 1.5),
    (("speculative", 1), 0.0, (("transformers", 1),), 2.0),
    (("speculative", 1), 0.0, (("vllm", 1), ("vllm-ngram", 1), ("vllm-draft", 1)), 1.0),
    (("speculative", 16), 0.0, (("target-alone", 16),), 1.0),
    (("speculative", 16), 1.0, (("target-alone", 16),), 1.0),
    (("target-alone", 16), 0.0, (("target-alone", 1),), 6.0),
)
"""One side, temperature, the sides of which the best counts, and the least ratio of tokens per second."""
_PREFIX_GOAL = 0.25
"""The project's goal for prefix caching: share of the time to the first token."""


def _goals(report: Report) -> Sheet:
    """The project's goals that this run measured. Ratios are medians of those within a round."""
    rows = []
    for one, temperature, others, needed in _GOALS:
        ratio = _ratio(report, one, temperature, others)
        if ratio is not None:
            best = " or ".join(name for name, _ in others)
            name = (
                f"{one[0]} at batch {one[1]} by {best} at batch {others[0][1]}, temperature {temperature:g}"
            )
            verdict = "met" if ratio >= needed else "not met"
            rows.append((name, f"at least {needed:g}", f"{ratio:.2f}", verdict))
    if (gain := report.prefix) is not None:
        name = f"time to first token with {gain.prefix_tokens} tokens served before, by the first time"
        verdict = "met" if gain.ratio <= _PREFIX_GOAL else "not met"
        rows.append((name, f"at most {_PREFIX_GOAL:g}", f"{gain.ratio:.2f}", verdict))
    return Sheet("To be reached", ("what", "needed", "reached", ""), tuple(rows))


def _ratio(report: Report, one: Side, temperature: float, others: Sequence[Side]) -> float | None:
    """Tokens per second by those of the fastest of others; None where they were not measured."""
    own, *found = (report.cell(name, batch, temperature) for name, batch in (one, *others))
    if own is None:
        return None
    ratios = (
        _median_ratio(own.tokens_per_second, cell.tokens_per_second) for cell in found if cell is not None
    )
    return min(ratios, default=None)


def _median_ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(speeds, others, strict=True))


def _absent(report: Report) -> list[str]:
    return [f"{report.titles.get(name, name)}: {why}" for name, why in report.absent.items()]


def _rich(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left")
    for index, name in enumerate(sheet.columns):
        # Figures stay whole; only the sentences of the first column may be broken.
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def markdown_table(sheet: Sheet) -> str:
    """A table as Markdown, under its title."""
    marks = ["---:" if index else "---" for index in range(len(sheet.columns))]
    lines = [" | ".join(row) for row in (sheet.columns, marks, *sheet.rows)]
    return "\n".join([f"## {sheet.title}", "", *(f"| {line} |" for line in lines)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1000:.0f} ms"


def _spread(spread: Spread) -> tuple[str, str]:
    low_to_high = f"{_milliseconds(spread.low)} to {_milliseconds(spread.high)}"
    return _milliseconds(spread.median), low_to_high


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
