"""`tandem generate`: stream one completion to the terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.command import command
from coordinator.cli.connection import ConnectionOptions, connect
from coordinator.cli.received import Record, show
from tandem.client import Client
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, RowKind


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt is."""

    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is stdin.")] = None
    prompt_token_ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None


@dataclass(frozen=True)
class RequestOptions:
    """How to complete it, in the words of `GenerationRequest`."""

    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = 128
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 1]")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the K highest logits; 0 keeps all.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Keep the smallest set with this mass; 1 keeps all.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens with this share of the highest probability.")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens that occurred, as in transformers.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Discourages tokens by how often the completion holds them, -2 to 2.")
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Discourages tokens that the completion holds, -2 to 2.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes the completion reproducible.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Tokens proposed per verification.")] = (
        None
    )
    rejection_sampling_strategy: Annotated[
        str | None, typer.Option(help="Acceptance rule, in MAX's or vLLM's spelling.")
    ] = None
    row_kind: Annotated[RowKind | None, typer.Option(help="Rows that the target answers with.")] = None
    speculation: Annotated[bool, typer.Option(help="Off: the target alone, through the same path.")] = True
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at end-of-sequence ids.")] = (
        False
    )

    def request(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        """The request for a prompt."""
        return GenerationRequest(prompt, **asdict(self) | {"stop": tuple(self.stop or ())})


@dataclass(frozen=True)
class ResultOptions:
    """What is printed."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False


def add_to(app: typer.Typer) -> None:
    """Add the command to the program."""
    command(
        app,
        "tandem generate 'def main():' --max-tokens 64",
        "tandem generate 'def main():' --temperature 0 --json",
        "tandem generate --prompt-file prompt.txt --address 10.0.0.5:50051 --token-file token",
    )(generate)


async def generate(
    prompt: PromptOptions,
    options: RequestOptions,
    result: ResultOptions,
    connection: ConnectionOptions,
    click: typer.Context,
) -> None:
    """Complete a prompt. On a terminal, accepted draft tokens are green; what the target supplied is not."""
    request = options.request(_prompt(prompt))
    where = connect(connection, click)
    async with Client(where.address, where.credentials) as client:
        chunks = client.generate(request, timeout_seconds=where.timeout_seconds)
        if result.as_json:
            record = Record()
            async for chunk in chunks:
                record.add(chunk)
            sys.stdout.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
        else:
            await show(chunks)


def _prompt(options: PromptOptions) -> str | tuple[int, ...]:
    given = [
        value
        for value in (options.prompt, options.prompt_file, options.prompt_token_ids)
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{len(given)} prompts were given; give exactly one of PROMPT, --prompt-file and --prompt-token-ids"
        )
    if options.prompt is not None:
        return options.prompt
    if options.prompt_token_ids is not None:
        return _ids(options.prompt_token_ids)
    assert options.prompt_file is not None
    return _content(options.prompt_file)


def _content(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--prompt-file {file} cannot be read as UTF-8 text: {error}") from None


def _ids(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise InvalidRequestError(f"--prompt-token-ids is {words!r}; it must be integers: 1,2,3") from None
