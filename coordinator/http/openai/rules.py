"""Rules for HTTP requests beside the rules for every request: fields of OpenAI's API that are not served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordinator.http.openai.fields import Endpoint
from coordinator.http.openai.known import unavailable
from coordinator.http.openai.schema import ChatBody, CompletionBody
from tandem.config.rule import Rule

Body = CompletionBody | ChatBody

MAX_CHOICES = 16
"""Maximum completions of one request."""

_NO_STRUCTURE = "this coordinator does not constrain what is written"


def _echo(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.echo:
        yield "echo is true; it must be false: this coordinator does not repeat the prompt"


def _response_format(body: Body) -> Iterator[str]:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        yield f"response_format is {kind}; it must be text: {_NO_STRUCTURE}"


def _tools(body: Body) -> Iterator[str]:
    if not isinstance(body, ChatBody):
        return
    for name in ("tools", "functions"):
        if getattr(body, name) and name not in body.passed_over:
            choice = "tool_choice" if name == "tools" else "function_call"
            yield f"{name} is set; it must be empty, or {choice} none: {_NO_STRUCTURE}"
    for name in ("tool_choice", "function_call"):
        value: Any = getattr(body, name)
        if value not in (None, "none", "auto"):
            shown = value if isinstance(value, str) else "set"
            yield f"{name} is {shown}; it must be none: {_NO_STRUCTURE}"


def _known_fields(body: Body) -> Iterator[str]:
    yield from unavailable(body, Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETIONS)


def _final_message(body: Body) -> Iterator[str]:
    if not isinstance(body, ChatBody) or not body.continue_final_message:
        return
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        yield "add_generation_prompt is true and continue_final_message too; one of them must be false"
    if body.messages and not isinstance(body.messages[-1].content, str):
        yield "continue_final_message is true; the last message's content must be a text"


def _best_of(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.choices):
        yield f"best_of is {body.best_of}; it must be n, {body.choices}: completions are not ranked"


def _suffix(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.suffix:
        yield "suffix is set; it must be empty: text is completed at its end only"


def _choices(body: Body) -> Iterator[str]:
    if body.choices < 1:
        yield f"n is {body.choices}; it must be at least 1"
        return
    prompts = body.prompt_count if isinstance(body, CompletionBody) else 1
    if prompts < 1:
        yield "prompt is empty; it must hold at least one prompt"
    if prompts * body.choices > MAX_CHOICES:
        of = f" for each of {prompts} prompts" if prompts > 1 else ""
        yield f"n is {body.choices}{of}; it must make at most {MAX_CHOICES} completions"


def _stream_options(body: Body) -> Iterator[str]:
    if body.stream_options is not None and not body.stream:
        yield "stream_options is set; it goes with stream true only"


def _top_logprobs(body: Body) -> Iterator[str]:
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        yield f"top_logprobs is {body.top_logprobs} and logprobs is not true; it must be"


def _messages(body: Body) -> Iterator[str]:
    if isinstance(body, ChatBody) and not body.messages:
        yield "messages is empty; it must hold at least one message"


HTTP_RULES: tuple[Rule[Body], ...] = (
    Rule("echo", "`echo` is false.", _echo),
    Rule("structured-output", "`response_format` is text.", _response_format),
    Rule("tools", "`tools` and `functions` are empty, and no call is required.", _tools),
    Rule(
        "known-fields",
        "Fields of OpenAI and vLLM that are not to be had here ask for nothing: the table of docs/http.md lists them.",
        _known_fields,
    ),
    Rule(
        "final-message",
        "`continue_final_message` goes with a last message of text and without a generation prompt.",
        _final_message,
    ),
    Rule("best-of", "`best_of` is `n`.", _best_of),
    Rule("suffix", "`suffix` is empty.", _suffix),
    Rule("choices", f"A request makes 1 to {MAX_CHOICES} completions.", _choices),
    Rule("stream-options", "`stream_options` goes with `stream`.", _stream_options),
    Rule("top-logprobs", "`top_logprobs` goes with `logprobs`.", _top_logprobs),
    Rule("messages", "A chat has a message.", _messages),
)
