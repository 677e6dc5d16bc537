"""Results of a benchmark run, as written to JSON; tables and charts are made from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.workload import Answer, Outcome


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
        tokens_per_second=tuple(outcome.token_count / outcome.seconds for outcome in outcomes),
        first_token_seconds=Spread.of([answer.arrivals[0][0] for answer in answers]),
        inter_token_seconds_p50=quantile(gaps, 0.5),
        inter_token_seconds_p99=quantile(gaps, 0.99),
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
