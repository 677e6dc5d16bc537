"""`tandem generate`: stream one completion to the terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.command import command
from coordinator.cli.connection import ConnectionOptions, connect
from coordinator.cli.output import print_parts
from coordinator.cli.received import Record, closing_line, received, show
from tandem.clients.aio import Client
from tandem.clients.options import as_message
from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.types import ChatMessage, GenerationRequest, RowKind


@dataclass(frozen=True)
class PromptOptions:
    """Source of the prompt."""

    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is stdin.")] = None
    prompt_token_ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says in a chat; the model answers.")
    ] = False
    system: Annotated[
        str | None, typer.Option(help="What the chat's system message says; goes with --chat.")
    ] = None


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

    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Tell each token's log probability, and so many of the most probable ones, 0 to 20."
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID:BIAS", help="Add to the target's logit of a token id; may be repeated."),
    ] = None
    min_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = 0
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="End at this token id; may be repeated.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop", help="Let the text end with what ended it.")
    ] = False

    def request(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        """The request for a prompt.

        Raises:
            ConfigurationError: a value cannot be read, or is out of range.
        """
        lists = {
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": dict(map(_bias, self.logit_bias or ())),
        }
        request = GenerationRequest(prompt, **asdict(self) | lists)
        try:
            as_message(request)
        except InvalidRequestError as error:
            raise ConfigurationError(str(error)) from None
        return request


@dataclass(frozen=True)
class ResultOptions:
    """The printed result."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each completion when it is done.")
    ] = False
    count: Annotated[
        int,
        typer.Option(
            "-n", min=1, help="Completions, one after the other; with --seed, seeds that follow it."
        ),
    ] = 1
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the closing line on stderr.")] = (
        False
    )


def add_to(app: typer.Typer) -> None:
    """Add the command to the program."""
    command(
        app,
        "tandem generate 'def main():' --max-tokens 64",
        "tandem generate 'def main():' --temperature 0 --json",
        "tandem generate --chat 'Name three colours.'",
        "tandem generate --prompt-file prompt.txt --address 10.0.0.5:50051 --token-file token",
    )(generate)


async def generate(
    prompt: PromptOptions,
    options: RequestOptions,
    result: ResultOptions,
    connection: ConnectionOptions,
    click: typer.Context,
) -> None:
    """Complete a prompt. On a terminal, accepted draft tokens are green, and bold where they were drafted ahead.

    The completion goes to stdout. Without --json or --quiet, a closing line on stderr has the speed and the gain of
    drafting, or the reason why the draft did not work.
    """
    given = _prompt(prompt)
    requests = [
        replace(options, seed=_following(options.seed, i)).request(given) for i in range(result.count)
    ]
    chat = _chat(prompt, given)
    where = connect(connection, click)
    records: list[Record] = []
    async with Client(where.address, where.credentials) as client:
        if chat:
            ids = await client.chat_prompt(chat, timeout_seconds=where.timeout_seconds)
            requests = [replace(request, prompt=ids) for request in requests]
        for request in requests:
            chunks = client.generate(request, timeout_seconds=where.timeout_seconds)
            if not result.as_json and result.count > 1:
                sys.stdout.write(f"--- {len(records) + 1} of {result.count}\n")
            record = await (received(chunks) if result.as_json else show(chunks))
            records.append(record)
            _tell(record, result)
    if not result.as_json and not result.quiet:
        sys.stderr.write(closing_line(records) + "\n")


def _tell(record: Record, result: ResultOptions) -> None:
    """Prints a completion's closing lines."""
    if result.as_json:
        sys.stdout.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
        sys.stdout.flush()
    elif record.logprobs:
        print_parts("", record.logprob_table())


def _following(seed: int | None, index: int) -> int | None:
    return None if seed is None else seed + index


def _prompt(options: PromptOptions) -> str | tuple[int, ...]:
    given = [
        value
        for value in (options.prompt, options.prompt_file, options.prompt_token_ids)
        if value is not None
    ]
    if len(given) != 1:
        raise ConfigurationError(
            f"{len(given)} prompts were given; give exactly one of PROMPT, --prompt-file and --prompt-token-ids"
        )
    if options.prompt is not None:
        return options.prompt
    if options.prompt_token_ids is not None:
        return _ids(options.prompt_token_ids)
    assert options.prompt_file is not None
    return _content(options.prompt_file)


def _chat(options: PromptOptions, prompt: str | tuple[int, ...]) -> list[ChatMessage]:
    """The messages of a chat; none for a plain prompt."""
    if not options.chat:
        if options.system is not None:
            raise ConfigurationError("--system is given and --chat is not; a system message goes with --chat")
        return []
    if not isinstance(prompt, str):
        raise ConfigurationError(
            "--prompt-token-ids and --chat are both given; the prompt of a chat is a text"
        )
    system = [] if options.system is None else [ChatMessage("system", options.system)]
    return [*system, ChatMessage("user", prompt)]


def _content(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompt-file {file} cannot be read as UTF-8 text: {error}") from None


def _bias(words: str) -> tuple[int, float]:
    token_id, _, bias = words.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigurationError(f"--logit-bias is {words!r}; it must be ID:BIAS, such as 5:-1.5") from None


def _ids(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise ConfigurationError(f"--prompt-token-ids is {words!r}; it must be integers: 1,2,3") from None
