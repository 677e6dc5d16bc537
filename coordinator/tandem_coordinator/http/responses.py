"""OpenAI's Responses: a body as the chat that it asks for, and the blocks of the answer as items and their events.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any, ClassVar

from tandem.errors import InvalidRequestError, TandemError
from tandem.model.types import SamplingParams
from tandem_coordinator.http.answers import Asked, JsonList
from tandem_coordinator.http.blocks import Block, BlockAnswer, BlockKind, Change, Moment, event_line
from tandem_coordinator.http.errors import error_object, shown
from tandem_coordinator.http.schema import ChatBody, ChatDialect, Items, Known, TextForm, as_one_text, only

_TEXTS = ("input_text", "output_text", "text")
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = [_LOGPROBS, _ENCRYPTED]
"""Parts of an answer that a request may ask for."""

# ---- from a body to a chat


class ResponseItem(Known):
    """One item of a response's input. Its type says which of the fields it has."""

    type: str = "message"
    role: str | None = None
    content: str | Items[dict[str, Any]] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Items[dict[str, Any]] | None = None
    summary: Items[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    @property
    def is_unfinished(self) -> bool:
        """True for a message of the model's that it is to go on with."""
        return (
            self.type == "message"
            and self.role == "assistant"
            and self.status in ("in_progress", "incomplete")
        )

    def text_of(self, place: str, field: str, kinds: tuple[str, ...] = _TEXTS) -> str:
        """The text of one of its fields, which must be there."""
        value = getattr(self, field)
        if value is None:
            raise InvalidRequestError(f"{place}.{field} is missing; an item of type {self.type} must have it")
        text: str = as_one_text(place, value, kinds)
        return text


class ResponseText(TextForm):
    """A response's text."""

    verbosity: Any = only("medium", because="the model has no such setting")


class ResponseReasoning(Known):
    """How a response reasons."""

    effort: str | None = None
    """A variable for the model's template; `none` also turns thinking off where the template can."""
    summary: str | None = None
    """Ignored: reasoning is returned in full."""


class ResponsesBody(ChatDialect):
    """`POST /v1/responses`."""

    limit_name: ClassVar = "max_output_tokens"
    prompt_name: ClassVar = "input"

    input: str | Items[ResponseItem]
    """The user's message, or the chat: messages, calls of functions, their outputs, and reasoning."""
    instructions: str | None = None
    """A system message before it."""
    max_output_tokens: int | None = None
    """As `max_tokens` of a completion."""
    text: ResponseText | None = None
    """Its `format` is the text's form."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call. Ignored with `tool_choice: none`."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto` (the default with tools), `required`, or a function by name."""
    parallel_tool_calls: bool | None = None
    """As of a chat."""
    max_tool_calls: int | None = None
    """Accepted: it limits tools of OpenAI's."""
    reasoning: ResponseReasoning | None = None
    """Its `effort` is a variable for the model's template."""
    stop: str | Items[str] | None = None
    """As of a completion."""
    logit_bias: dict[int, float] | None = None
    """As of a completion."""
    structured_outputs: dict[str, Any] | None = None
    """As of a completion."""
    include_reasoning: Any = only(True, because="reasoning is an item of the output")
    spaces_between_special_tokens: Any = only(True, because="the tokenizer decides about spaces")
    media_io_kwargs: Any = only({}, because="the model reads and writes text only")
    mm_processor_kwargs: Any = only({}, because="the model reads and writes text only")
    enable_response_messages: Any = only(
        False, because="the prompt's and the answer's messages are not returned"
    )
    stream_options: dict[str, Any] | None = None
    """Accepted: nothing is added against measuring lengths."""
    include: Items[str] | None = None
    """`message.output_text.logprobs` returns log probabilities of the text's tokens, `reasoning.encrypted_content` is
    ignored, anything else is refused."""
    top_logprobs: int | None = None
    """With log probabilities, those of this many alternatives too, up to 20."""
    previous_response_id: Any = only(because="this coordinator does not keep responses")
    conversation: Any = only(
        because="this coordinator does not keep conversations; send all of it as `input`"
    )
    prompt: Any = only(because="this coordinator does not keep prompt templates")
    previous_input_messages: Any = only(because="send the whole conversation as `input`")
    context_management: Any = only([], because="this coordinator does not shorten prompts")
    background: Any = only(False, because="this coordinator does not keep responses")
    truncation: Any = only("disabled", because="this coordinator does not shorten prompts")

    @property
    def unused(self) -> dict[str, bool]:
        return {
            "tools": bool(self.tools) and self.tool_choice == "none",
            "include": _ENCRYPTED in (self.include or ()),
            "top_logprobs": bool(self.top_logprobs) and not self.has_logprobs,
            "reasoning.summary": self.reasoning is not None and self.reasoning.summary is not None,
        }

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.text is not None:
            yield from (f"text.{sentence}" for sentence in self.text.refusals())
        for index, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                kind = shown(tool.get("type"))
                yield f'tools.{index}.type is {kind}; it must be "function": only functions are called'
        if others := [name for name in self.include or () if name not in _INCLUDED]:
            yield f"include is {shown(others)}; it must be of {shown(_INCLUDED)}: nothing else exists"

    @property
    def has_logprobs(self) -> bool:
        """True if the answer is to have log probabilities."""
        return _LOGPROBS in (self.include or ())

    def chat(self) -> ChatBody:
        effort = None if self.reasoning is None else self.reasoning.effort
        variables = {} if effort is None else {"enable_thinking": effort != "none"}
        return self.make_chat(
            self._messages(),
            variables,
            response_format=None if self.text is None else self.text.response_format,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
            stop=self.stop,
            logit_bias=self.logit_bias,
            structured_outputs=self.structured_outputs,
            tools=[*map(_chat_tool, self.tools)] if self.tools else None,
            tool_choice=_chat_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=effort,
            continue_final_message=not isinstance(self.input, str)
            and bool(self.input)
            and self.input[-1].is_unfinished,
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add_item(messages, f"input.{index}", item)
        return messages


def _add_item(messages: list[dict[str, Any]], place: str, item: ResponseItem) -> None:
    """Add an item to a chat. Reasoning, text and calls that follow each other are one message of the model's."""
    match item.type:
        case "message":
            if item.role is None:
                raise InvalidRequestError(f"{place}.role is missing; a message must have it")
            content = item.text_of(place, "content")
            own = _own_message(messages, "content") if item.role == "assistant" else None
            if own is None:
                messages.append({"role": item.role, "content": content})
            else:
                own["content"] = content
        case "reasoning":
            if item.encrypted_content is not None:
                raise InvalidRequestError(
                    f"{place}.encrypted_content is set; it must be left out: reasoning is not encrypted here"
                )
            field = "content" if item.content else "summary"
            text = item.text_of(place, field, ("reasoning_text", "summary_text"))
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        case "function_call":
            call = {
                "id": item.text_of(place, "call_id"),
                "type": "function",
                "function": {
                    "name": item.text_of(place, "name"),
                    "arguments": item.text_of(place, "arguments"),
                },
            }
            own = _own_message(messages)
            if own is None:
                own = {"role": "assistant", "content": None}
                messages.append(own)
            own.setdefault("tool_calls", []).append(call)
        case "function_call_output":
            call_id = item.text_of(place, "call_id")
            output = item.text_of(place, "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case _:
            raise InvalidRequestError(
                f"{place}.type is {shown(item.type)}; it must be message, function_call, function_call_output or "
                "reasoning"
            )


def _own_message(messages: list[dict[str, Any]], field: str = "") -> dict[str, Any] | None:
    """The last message, if it is the model's own, and has no calls and no such field yet."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return None
    if field and (last.get(field) is not None or "tool_calls" in last):
        return None
    return last


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}}


def _chat_tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


# ---- from blocks to items

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


class ResponseAnswer(BlockAnswer):
    """An answer of `/v1/responses`."""

    def __init__(self, body: ResponsesBody, defaults: SamplingParams, asked: Asked) -> None:
        """`defaults` are the sampling parameters where the body names none."""
        super().__init__(asked)
        sampled = {
            name: value if (given := getattr(body, name)) is None else given
            for name, value in asdict(defaults).items()
            if name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")
        }
        reasoning = body.reasoning
        self._has_logprobs = body.has_logprobs
        self._numbers = count()
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": asked.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None if reasoning is None else {"effort": reasoning.effort, "summary": None},
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "usage": None,
            **sampled,
        }

    def whole(self) -> dict[str, Any]:
        account = self.account()
        usage = account.pop("usage")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            **self._head,
            "status": "incomplete" if self.is_cut else "completed",
            "output": [self._item(block) for block in self.blocks],
            "incomplete_details": {"reason": "max_output_tokens"} if self.is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoned},
                "total_tokens": usage["total_tokens"],
            },
            **account,
        }

    def failure(self, error: TandemError) -> bytes:
        described = error_object(error)["error"]
        return event_line(
            {"type": "error", **{name: described[name] for name in ("code", "message", "param")}}
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        described = {"type": f"response.{kind}", **content, "sequence_number": next(self._numbers)}
        return event_line(described, has_lists=self._has_logprobs)

    def _begin(self) -> Iterator[bytes]:
        begun = {**self._head, "status": "in_progress", "output": []}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)

    def _change(self, change: Change) -> Iterator[bytes]:
        block = change.block
        output: dict[str, Any] = {"output_index": block.index}
        place: dict[str, Any] = {"item_id": _item_id(block), **output}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        kind = _EVENTS[block.kind]
        is_text = block.kind is BlockKind.TEXT
        match change.moment:
            case Moment.BEGAN:
                yield self._event("output_item.added", **output, item=self._item(block, "in_progress"))
                if block.kind is not BlockKind.CALL:
                    yield self._event(
                        "content_part.added", **place, part=_part(Block(block.kind, block.index))
                    )
            case Moment.GREW:
                told: dict[str, Any] = {"logprobs": _shown(JsonList(change.logprobs))} if is_text else {}
                yield self._event(f"{kind}.delta", **place, delta=change.piece, **told)
            case Moment.ENDED:
                if block.kind is BlockKind.CALL:
                    yield self._event(f"{kind}.done", **place, name=block.function, arguments=block.text)
                else:
                    told = {"logprobs": _shown(block.logprobs)} if is_text else {}
                    yield self._event(f"{kind}.done", **place, text=block.text, **told)
                    yield self._event("content_part.done", **place, part=_part(block))
                yield self._event("output_item.done", **output, item=self._item(block))

    def _end(self) -> Iterator[bytes]:
        response = self.whole()
        yield self._event(response["status"], response=response)

    def _item(self, block: Block, status: str = "") -> dict[str, Any]:
        """A block as an item: at its end, or `in_progress`."""
        has_begun_only = status == "in_progress"
        if not status:
            is_last = block is self.blocks[-1]
            status = "incomplete" if self.is_cut and is_last else "completed"
        item: dict[str, Any] = {"id": _item_id(block), "status": status}
        parts = [] if has_begun_only else [_part(block)]
        match block.kind:
            case BlockKind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": parts}
            case BlockKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": parts}
            case BlockKind.CALL:
                named = {"call_id": block.call_id, "name": block.function}
                # Arguments that came with its beginning follow as a delta.
                arguments = "" if has_begun_only else block.text
                return {**item, "type": "function_call", **named, "arguments": arguments}


_EVENTS = {
    BlockKind.REASONING: "reasoning_text",
    BlockKind.TEXT: "output_text",
    BlockKind.CALL: "function_call_arguments",
}
"""Names of the events of a block that grows."""


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": _shown(block.logprobs),
    }


def _shown(logprobs: JsonList) -> JsonList | list[Any]:
    """Entries as they are, or a list that anything can render where there are none."""
    return logprobs or []
