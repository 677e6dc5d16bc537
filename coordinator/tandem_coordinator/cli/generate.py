"""`tandem generate` and `tandem chat`: complete a prompt or answer a chat, and show what the draft guessed right."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from pydantic import BeforeValidator, Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.clients.client import Client, as_message
from tandem.clients.sync_client import SyncClient
from tandem.config.rule import Rules, rule
from tandem.errors import ConfigurationError, InvalidRequestError, plural
from tandem.model.sampling.defaults import DEFAULT_NAMES
from tandem.model.types import ChatMessage, Chunk, GenerationRequest, RowKind, SamplingParams, Summary
from tandem.serving.standard_streams import write_out
from tandem_coordinator.cli.command import VerbOptions, command, plain_table, print_parts
from tandem_coordinator.cli.connection import Connection
from tandem_coordinator.cli.main import app
from tandem_coordinator.cli.views import percent
from tandem_coordinator.stats.rounds import hit_rate
from tandem_coordinator.stats.speculation import (
    acceptance_rate,
    describe,
    describe_sampling,
    sum_stats,
    tokens_per_pass,
)

ACCEPTED_STYLE = "green"
"""Colour of the tokens that the draft proposed and the target accepted."""


@dataclass(slots=True)
class Record:
    """A completion as it was received."""

    started: float = field(default_factory=time.perf_counter)
    chunks: list[Chunk] = field(default_factory=list)
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    def add(self, chunk: Chunk, console: Console | None = None) -> None:
        """Record a chunk and its time of arrival, and show it on a console."""
        self.total_seconds = time.perf_counter() - self.started
        if not any(each.token_ids for each in self.chunks):
            self.first_token_seconds = self.total_seconds
        self.chunks.append(chunk)
        if console is not None:
            accepted = f"bold {ACCEPTED_STYLE}" if chunk.drafted_ahead else ACCEPTED_STYLE
            tokens = zip(texts_of_tokens(chunk), chunk.drafted, strict=True)
            parts = ((text, accepted if drafted else "") for text, drafted in tokens)
            console.print(Text.assemble(*parts), end="")
            console.file.flush()

    @property
    def whole(self) -> Chunk:
        """All chunks so far as one."""
        return Chunk.join(self.chunks or [Chunk("", (), (), ())])

    @property
    def summary(self) -> Summary:
        """The summary of a completion that has ended."""
        summary = self.chunks[-1].summary
        assert summary is not None
        return summary

    def as_dict(self) -> dict[str, object]:
        """The result of `--json`."""
        whole = self.whole
        summary = self.summary
        return {
            "text": whole.text,
            "token_ids": whole.token_ids,
            **({"logprobs": [*self._logprobs()]} if whole.logprobs else {}),
            **self._sampled_logprobs(whole),
            "finish_reason": summary.finish_reason.value,
            "usage": {
                "prompt_tokens": summary.prompt_tokens,
                "cached_tokens": summary.cached_tokens,
                "completion_tokens": summary.completion_tokens,
            },
            "speculation": describe(summary.speculation, summary.speculation_state),
            **({} if summary.sampling is None else {"sampling": describe_sampling(summary.sampling)}),
            "rounds": [
                {
                    "proposed": chunk.proposed,
                    "accepted": sum(chunk.drafted),
                    "tokens": len(chunk.token_ids),
                    "drafted_ahead": chunk.drafted_ahead,
                }
                for chunk in self.chunks
            ],
            "timing": {
                "time_to_first_token_seconds": round(self.first_token_seconds, 6),
                "tokens_per_second": round(len(whole.token_ids) / self.total_seconds, 3),
            },
            "request_id": summary.request_id,
            "seed": summary.seed,
            "weights": [
                {"version": each.version, "fingerprint": each.fingerprint} for each in summary.weights
            ],
        }

    def _sampled_logprobs(self, whole: Chunk) -> dict[str, object]:
        if not whole.raw_logprobs:
            return {}
        return {"raw_logprobs": whole.raw_logprobs, "processed_logprobs": whole.processed_logprobs}

    def logprob_table(self) -> Table:
        """A row for each token: its text, its probability, and the most probable tokens at its position."""
        table = plain_table("TOKEN", ">ID", ">LOGPROB", ">PROB", "MOST PROBABLE (ID: LOGPROB)")
        for each in self._logprobs():
            table.add_row(
                Text(repr(each["text"])),
                str(each["token_id"]),
                f"{each['logprob']:.3f}",
                percent(math.exp(each["logprob"])),
                ", ".join(f"{top['token_id']}: {top['logprob']:.3f}" for top in each["top"]),
            )
        return table

    def _logprobs(self) -> Iterator[dict[str, Any]]:
        whole = self.whole
        texts = texts_of_tokens(whole)
        for text, token_id, position in zip(texts, whole.token_ids, whole.logprobs, strict=True):
            tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
            top = [{"token_id": top_id, "logprob": logprob} for top_id, logprob in tops]
            yield {"text": text, "token_id": token_id, "logprob": position.logprob, "top": top}


def texts_of_tokens(chunk: Chunk) -> list[str]:
    """The text that each token of a piece completed."""
    ends = [*accumulate(chunk.text_lengths, initial=0)]
    return [chunk.text[start:end] for start, end in pairwise(ends)]


def closing_line(records: Sequence[Record], request: GenerationRequest) -> str:
    """Speed of finished completions and the gain of drafting, or the reason why the draft did not work; and how they
    were sampled where the request does not say it."""
    summaries = [record.summary for record in records]
    stats = sum_stats(summary.speculation for summary in summaries)
    state = next(filter(None, (summary.speculation_state for summary in reversed(summaries))), None)
    tokens = sum(len(record.whole.token_ids) for record in records)
    seconds = sum(record.total_seconds for record in records)
    parts = [f"{plural(tokens, 'token')} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if stats.drafted:
        saved = tokens - stats.rounds
        parts.append(
            f"{percent(acceptance_rate(stats))} of {plural(stats.drafted, 'proposed token')} accepted, "
            f"{tokens_per_pass(stats):.2f} tokens per pass, "
            f"{saved:,} {'pass' if saved == 1 else 'passes'} of the target saved"
        )
    if stats.ahead.awaited:
        rounds = plural(stats.ahead.awaited, "round")
        parts.append(f"{percent(hit_rate(stats.ahead))} of {rounds} drafted ahead")
    if state is not None and state.explanation:
        parts.append(state.explanation if state.is_on else f"speculation off: {state.explanation}")
    if (sampling := summaries[-1].sampling) is not None:
        parts += _sampling_words(request, sampling)
    return "; ".join(parts)


_SAMPLING_NAMES = tuple(name for name in DEFAULT_NAMES if name in SamplingParams.__dataclass_fields__)
"""Sampling parameters that a server may have defaults of."""


def _sampling_words(request: GenerationRequest, sampling: SamplingParams) -> Iterator[str]:
    """How tokens were drawn, as far as it is not what the request asks for or OpenAI's default."""
    if request.temperature and sampling.is_greedy:
        yield f"temperature {request.temperature:g} is too low to compute and counts as 0: greedy"
    usual = SamplingParams()
    # Truncation has no effect on the most probable token.
    names = ("temperature", "repetition_penalty") if sampling.is_greedy else _SAMPLING_NAMES
    chosen = [
        f"{name} {getattr(sampling, name):g}"
        for name in names
        if getattr(request, name) is None and getattr(sampling, name) != getattr(usual, name)
    ]
    if chosen:
        yield f"{', '.join(chosen)} by the server's defaults"


def _read_ids(words: Any) -> Any:
    try:
        return tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise ValueError("it must be integers: 1,2,3") from None


@rule("There is one prompt.")
def _one_prompt(options: PromptOptions) -> Iterator[str]:
    prompts = (options.prompt, options.prompt_file, options.prompt_token_ids)
    if (count := sum(each is not None for each in prompts)) != 1:
        yield f"{count} prompts were given; give exactly one of PROMPT, --prompt-file and --prompt-token-ids"


@rule("A chat has messages of text.")
def _chat(options: PromptOptions) -> Iterator[str]:
    if options.system is not None and not options.chat:
        yield "--system is given and --chat is not; a system message needs --chat"
    if options.chat and options.prompt_token_ids is not None:
        yield "--prompt-token-ids and --chat are both given; the prompt of a chat is a text"


class PromptOptions(VerbOptions):
    """Source of the prompt."""

    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT")] = None
    """The prompt."""
    prompt_file: Path | None = None
    """Read the prompt from a file; - is stdin."""
    prompt_token_ids: Annotated[tuple[int, ...], BeforeValidator(_read_ids)] | None = None
    """The prompt as token ids: 1,2,3."""
    chat: Annotated[bool, typer.Option("--chat")] = False
    """Send the prompt as a user's chat message."""
    system: str | None = None
    """The chat's system message; needs --chat."""

    own_rules: ClassVar[Rules] = (_one_prompt, _chat)

    def read(self) -> str | tuple[int, ...]:
        """The prompt, wherever it is."""
        if (file := self.prompt_file) is not None:
            try:
                return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"--prompt-file {file} cannot be read as UTF-8 text: {error}"
                ) from None
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        return self.prompt or ""


def _read_bias(words: Any) -> Any:
    token_id, _, bias = words.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError("it must be ID:BIAS, such as 5:-1.5") from None


class RequestOptions(VerbOptions):
    """Options of the completion, in the words of `GenerationRequest`."""

    repeatable: ClassVar = ("stop", "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words")

    max_tokens: int | None = 128
    """Maximum tokens to generate."""
    temperature: float | None = None
    """0 is greedy. [default: 1]"""
    top_k: int | None = None
    """Sample from the K most probable tokens; 0 keeps all."""
    top_p: float | None = None
    """Sample from the fewest tokens that have this probability together; 1 keeps all."""
    min_p: float | None = None
    """Drop tokens below this share of the highest probability."""
    repetition_penalty: float | None = None
    """Above 1 makes earlier tokens less likely, as in transformers."""
    frequency_penalty: float | None = None
    """Makes tokens less likely by how often the completion has them, -2 to 2."""
    presence_penalty: float | None = None
    """Makes tokens less likely that the completion has, -2 to 2."""
    seed: int | None = None
    """Makes the completion reproducible under strict (which auto picks for it) and with the fixed policy; otherwise
    the text also depends on how many tokens were proposed."""
    stop: tuple[str, ...] = ()
    """End before this string; may be repeated."""
    num_speculative_tokens: int | None = None
    """Tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, in MAX's or vLLM's spelling."""
    row_kind: RowKind | None = None
    """Kind of rows that the target sends."""
    speculation: bool = True
    """Off: the target works alone."""
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False
    """Do not end at end-of-sequence ids."""
    logprobs: int | None = None
    """Return log probabilities of each token and of this many most probable ones, 0 to 20."""
    sampled_logprobs: Annotated[bool, typer.Option("--sampled-logprobs")] = False
    """With --json: return two log probabilities of each token, by the model alone (raw_logprobs) and by the
    distribution that it was drawn from (processed_logprobs)."""
    logit_bias: Annotated[
        tuple[Annotated[tuple[int, float], BeforeValidator(_read_bias)], ...],
        typer.Option(metavar="ID:BIAS"),
    ] = ()
    """Add to the target's logit of a token id; may be repeated."""
    min_tokens: int = 0
    """Minimum tokens to generate."""
    stop_token_ids: Annotated[tuple[int, ...], typer.Option("--stop-token-id")] = ()
    """End at this token id; may be repeated."""
    allowed_token_ids: Annotated[tuple[int, ...], typer.Option("--allowed-token-id")] = ()
    """Write only tokens of these ids; may be repeated."""
    bad_words: Annotated[tuple[str, ...], typer.Option("--bad-word")] = ()
    """Do not write this text; may be repeated."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of a longer prompt; -1 keeps as many as leave room for a token."""
    priority: int = 0
    """Wait for a place before requests with a higher value."""
    include_stop_str_in_output: Annotated[bool, typer.Option("--include-stop")] = False
    """Include the stop string or token in the text."""
    cache_salt: str | None = None
    """Share prefix cache and earlier answers only with requests of this salt, up to 256 characters."""

    def request(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        values = self.model_dump() | {"logit_bias": dict(self.logit_bias)}
        request = GenerationRequest(prompt, **values)
        try:
            as_message(request)
        except InvalidRequestError as error:
            raise ConfigurationError(str(error)) from None
        return request


class ResultOptions(VerbOptions):
    """The printed result."""

    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print each completion as one JSON object when it is done."""
    count: Annotated[int, typer.Option("-n")] = Field(default=1, ge=1)
    """Completions, one after the other; with --seed, seeds that follow it."""
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False
    """Do not print the closing line on stderr."""


@command(
    app,
    "'def main():' --max-tokens 64",
    "'def main():' --temperature 0 --json",
    "--chat 'Name three colours.'",
    "--prompt-file prompt.txt --address 10.0.0.5:50051 --token-file token",
)
async def generate(
    prompt: PromptOptions,
    options: RequestOptions,
    result: ResultOptions,
    connection: Connection,
) -> None:
    """Complete a prompt. On a terminal, accepted draft tokens are green, and bold where they were drafted ahead.

    The completion goes to stdout. Without --json or --quiet, a closing line on stderr has the speed and the gain of
    drafting, or the reason why the draft did not work.
    """
    given = prompt.read()
    request = options.request(given)
    messages = _messages(prompt, given)
    console = None if result.as_json else Console(highlight=False, soft_wrap=True)
    records: list[Record] = []
    async with Client(*connection.endpoint) as client:
        if messages:
            ids = await client.chat_prompt(messages, timeout_seconds=connection.timeout)
            request = replace(request, prompt=ids)
        for index in range(result.count):
            seed = None if request.seed is None else request.seed + index
            if console is not None and result.count > 1:
                sys.stdout.write(f"--- {index + 1} of {result.count}\n")
            records.append(record := Record())
            async for chunk in client.generate(request, timeout_seconds=connection.timeout, seed=seed):
                record.add(chunk, console)
            if console is None:
                write_out(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
                continue
            console.print()
            if record.whole.logprobs:
                print_parts("", record.logprob_table())
    if console is not None and not result.quiet:
        sys.stderr.write(closing_line(records, request) + "\n")


@command(app, "", "--system 'Answer in one sentence.' --temperature 0")
def chat(
    options: RequestOptions,
    connection: Connection,
    system: Annotated[str | None, typer.Option(help="What the chat's system message says.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Leave out the line with speed and gain after each answer.")
    ] = False,
) -> None:
    """Chat with the model. On a terminal, accepted draft tokens are green, and bold where they were drafted ahead.

    Each line is a message. Ctrl-C ends an answer, Ctrl-D the chat.
    """
    console = Console(highlight=False, soft_wrap=True)
    messages = _system(system)
    with SyncClient(*connection.endpoint) as client:
        for line in _lines():
            messages.append(ChatMessage("user", line))
            record = Record()
            request = options.request(())
            try:
                prompt = client.chat_prompt(messages, timeout_seconds=connection.timeout)
                request = replace(request, prompt=prompt)
                for chunk in client.generate(request, timeout_seconds=connection.timeout):
                    record.add(chunk, console)
            except KeyboardInterrupt:
                pass  # the conversation goes on from what there is
            console.print()
            whole = record.whole
            messages.append(ChatMessage("assistant", whole.text))
            if whole.summary is not None and not quiet:
                sys.stderr.write(closing_line([record], request) + "\n")


def _lines() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # lines can be edited, and called back
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                sys.stdout.write("\n")
            return
        if line.strip():
            yield line


def _messages(options: PromptOptions, prompt: str | tuple[int, ...]) -> list[ChatMessage]:
    """The messages of a chat; none for a plain prompt."""
    if not options.chat or not isinstance(prompt, str):
        return []
    return [*_system(options.system), ChatMessage("user", prompt)]


def _system(text: str | None) -> list[ChatMessage]:
    return [] if text is None else [ChatMessage("system", text)]
