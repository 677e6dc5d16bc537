"""A completion as it is received: printed while it streams, or as a whole at its end."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin.words import percent, plural
from coordinator.cli.output import plain_table
from coordinator.stats.ahead import hit_rate
from coordinator.stats.speculation import acceptance_rate, add, describe_with_state, tokens_per_pass
from tandem.types import Chunk, SpeculationStats, Summary, TokenLogprobs

ACCEPTED_STYLE = "green"
"""Colour of the tokens that the draft proposed and the target accepted."""
AHEAD_STYLE = "bold green"
"""The same, where the proposal was drafted during the verification before it."""


@dataclass(slots=True)
class Record:
    """A completion as it was received."""

    started: float = field(default_factory=time.perf_counter)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each token, when they were asked for."""
    rounds: list[dict[str, object]] = field(default_factory=list)
    """Each round, as `--json` tells it."""
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    summary: Summary | None = None

    def add(self, chunk: Chunk) -> None:
        """Record a chunk and its time of arrival."""
        self.total_seconds = time.perf_counter() - self.started
        if not self.token_ids:
            self.first_token_seconds = self.total_seconds
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.token_texts += texts_of_tokens(chunk)
        self.logprobs += chunk.logprobs
        self.rounds.append(
            {
                "proposed": chunk.proposed,
                "accepted": sum(chunk.drafted),
                "tokens": len(chunk.token_ids),
                "drafted_ahead": chunk.drafted_ahead,
            }
        )
        self.summary = chunk.summary

    def as_dict(self) -> dict[str, object]:
        """The result of `--json`."""
        summary = self.summary
        assert summary is not None
        logprobs = {"logprobs": [*map(self._logprobs_at, range(len(self.logprobs)))]} if self.logprobs else {}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            **logprobs,
            "finish_reason": summary.finish_reason.value,
            "usage": {"prompt_tokens": summary.prompt_tokens, "completion_tokens": summary.completion_tokens},
            "speculation": describe_with_state(summary.speculation, summary.speculation_state),
            "rounds": self.rounds,
            "timing": {
                "time_to_first_token_seconds": round(self.first_token_seconds, 6),
                "tokens_per_second": round(len(self.token_ids) / self.total_seconds, 3),
            },
            "request_id": summary.request_id,
            "seed": summary.seed,
        }

    def logprob_table(self) -> Table:
        """A row for each token: its text, its probability, and the most probable tokens at its position."""
        table = plain_table("TOKEN", ">ID", ">LOGPROB", ">PROB", "MOST PROBABLE (ID: LOGPROB)")
        for index, position in enumerate(self.logprobs):
            tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
            table.add_row(
                Text(repr(self.token_texts[index])),
                str(self.token_ids[index]),
                f"{position.logprob:.3f}",
                percent(math.exp(position.logprob)),
                ", ".join(f"{token_id}: {logprob:.3f}" for token_id, logprob in tops),
            )
        return table

    def _logprobs_at(self, index: int) -> dict[str, object]:
        position = self.logprobs[index]
        tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
        return {
            "text": self.token_texts[index],
            "token_id": self.token_ids[index],
            "logprob": position.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in tops],
        }


async def received(chunks: AsyncIterator[Chunk]) -> Record:
    """A finished completion."""
    record = Record()
    async for chunk in chunks:
        record.add(chunk)
    return record


async def show(chunks: AsyncIterator[Chunk]) -> Record:
    """Write a completion to stdout as it streams, in colour when stdout is a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    record = Record()
    async for chunk in chunks:
        record.add(chunk)
        console.print(styled(chunk), end="")
        console.file.flush()
    console.print()
    return record


def texts_of_tokens(chunk: Chunk) -> list[str]:
    """The text that each token of a piece completed."""
    texts, start = [], 0
    for length in chunk.text_lengths:
        texts.append(chunk.text[start : start + length])
        start += length
    return texts


def styled(chunk: Chunk) -> Text:
    """The chunk's text with accepted tokens in colour, in bold where they were drafted ahead."""
    text = Text()
    accepted = AHEAD_STYLE if chunk.drafted_ahead else ACCEPTED_STYLE
    for token_text, drafted in zip(texts_of_tokens(chunk), chunk.drafted, strict=True):
        text.append(token_text, style=accepted if drafted else "")
    return text


def closing_line(records: Sequence[Record]) -> str:
    """Speed of finished completions and the gain of drafting, or the reason why the draft did not work."""
    stats, tokens = SpeculationStats(), sum(len(record.token_ids) for record in records)
    seconds = sum(record.total_seconds for record in records)
    state = None
    for record in records:
        assert record.summary is not None
        add(stats, record.summary.speculation)
        state = record.summary.speculation_state or state
    parts = [f"{plural(tokens, 'token')} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if stats.drafted:
        saved = tokens - stats.rounds
        parts.append(
            f"{percent(acceptance_rate(stats))} of {plural(stats.drafted, 'proposed token')} accepted, "
            f"{tokens_per_pass(stats):.2f} tokens per pass, "
            f"{saved:,} {'pass' if saved == 1 else 'passes'} of the target saved"
        )
    if stats.ahead.awaited:
        parts.append(
            f"{percent(hit_rate(stats.ahead))} of {plural(stats.ahead.awaited, 'round')} drafted ahead"
        )
    if state is not None and state.explanation:
        parts.append(state.explanation if state.is_on else f"speculation off: {state.explanation}")
    return "; ".join(parts)
