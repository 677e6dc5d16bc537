"""A completion as it is received: shown while it comes, or told as a whole when it is done."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from coordinator.figures import describe
from tandem.types import Chunk, Summary

ACCEPTED_STYLE = "green"
"""Colour of the tokens that the draft proposed and the target accepted."""


@dataclass(slots=True)
class Record:
    """A completion as it was received."""

    started: float = field(default_factory=time.perf_counter)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    summary: Summary | None = None

    def add(self, chunk: Chunk) -> None:
        """Note a piece and when it came."""
        self.total_seconds = time.perf_counter() - self.started
        if not self.token_ids:
            self.first_token_seconds = self.total_seconds
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.summary = chunk.summary

    def as_dict(self) -> dict[str, object]:
        """What --json prints."""
        summary = self.summary
        assert summary is not None
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": summary.finish_reason.value,
            "usage": {"prompt_tokens": summary.prompt_tokens, "completion_tokens": summary.completion_tokens},
            "speculation": describe(summary.speculation),
            "timing": {
                "time_to_first_token_seconds": round(self.first_token_seconds, 6),
                "tokens_per_second": round(len(self.token_ids) / self.total_seconds, 3),
            },
            "request_id": summary.request_id,
            "seed": summary.seed,
        }


async def show(chunks: AsyncIterator[Chunk]) -> Record:
    """Write a completion to stdout as it comes, in colour when stdout is a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    record = Record()
    async for chunk in chunks:
        record.add(chunk)
        console.print(styled(chunk), end="")
        console.file.flush()
    console.print()
    return record


def styled(chunk: Chunk) -> Text:
    """The chunk's text with accepted tokens in colour."""
    text, start = Text(), 0
    for length, drafted in zip(chunk.text_lengths, chunk.drafted, strict=True):
        text.append(chunk.text[start : start + length], style=ACCEPTED_STYLE if drafted else "")
        start += length
    return text
