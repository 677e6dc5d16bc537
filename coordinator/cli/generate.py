"""`tandem generate`: stream one completion to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coordinator.cli.exit_codes import exit_code
from coordinator.figures import describe
from tandem.client import DEFAULT_ADDRESS, Client
from tandem.errors import InvalidRequestError, TandemError
from tandem.settings import exit_with
from tandem.types import Chunk, GenerationRequest, RowKind, Summary

ACCEPTED_STYLE = "green"
"""Colour of the tokens that the draft proposed and the target accepted."""


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is stdin.")] = None,
    prompt_token_ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None,
    address: Annotated[str, typer.Option(help="host:port of the coordinator.")] = DEFAULT_ADDRESS,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K highest logits; 0 keeps all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the smallest set with this mass; 1 keeps all.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens with this share of the highest probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens that occurred, as in transformers.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Discourages tokens by how often the completion holds them, -2 to 2.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Discourages tokens that the completion holds, -2 to 2.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the completion reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens proposed per verification.")
    ] = None,
    rejection_sampling_strategy: Annotated[
        str | None, typer.Option(help="Acceptance rule, in MAX's or vLLM's spelling.")
    ] = None,
    row_kind: Annotated[RowKind | None, typer.Option(help="Rows that the target answers with.")] = None,
    speculation: Annotated[bool, typer.Option(help="Off: the target alone, through the same path.")] = True,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at end-of-sequence ids.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
) -> None:
    """Complete a prompt. On a terminal, accepted draft tokens are green; what the target supplied is not."""
    try:
        request = GenerationRequest(
            prompt=_prompt(prompt, prompt_file, prompt_token_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
            stop=tuple(stop or ()),
            num_speculative_tokens=num_speculative_tokens,
            rejection_sampling_strategy=rejection_sampling_strategy,
            speculation=speculation,
            row_kind=row_kind,
            ignore_eos=ignore_eos,
        )
        asyncio.run(_run(address, request, as_json))
    except TandemError as error:
        exit_with(error, exit_code(error))


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


async def _run(address: str, request: GenerationRequest, as_json: bool) -> None:
    async with Client(address) as client:
        chunks = client.generate(request)
        if as_json:
            record = Record()
            async for chunk in chunks:
                record.add(chunk)
            sys.stdout.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
        else:
            await show(chunks)


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


def _prompt(text: str | None, file: Path | None, token_ids: str | None) -> str | tuple[int, ...]:
    given = [value for value in (text, file, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{len(given)} prompts were given; give exactly one of PROMPT, --prompt-file and --prompt-token-ids"
        )
    if text is not None:
        return text
    if token_ids is not None:
        return _ids(token_ids)
    assert file is not None
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--prompt-file {file} cannot be read as UTF-8 text: {error}") from None


def _ids(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise InvalidRequestError(f"--prompt-token-ids is {words!r}; it must be integers: 1,2,3") from None
