"""Anthropic's Messages: a body as the chat that it asks for, and the blocks of the answer as content and its events.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from tandem.errors import InvalidRequestError, TandemError
from tandem_coordinator.http.answers import Asked
from tandem_coordinator.http.blocks import Block, BlockAnswer, BlockKind, Change, Moment, event_line
from tandem_coordinator.http.errors import anthropic_error_object, shown
from tandem_coordinator.http.schema import ChatBody, ChatDialect, Items, Known, TextForm, as_one_text, only

# Claude Code begins its system prompt with such a block, which differs in each request: no prefix would be found.
_BILLING = "x-anthropic-billing-header"

# ---- from a body to a chat


class ContentBlock(Known):
    """A block of a message's content. Its type says which of the fields it has."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Items[dict[str, Any]] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: Items[dict[str, Any]] | None = None

    def field(self, place: str, name: str) -> Any:
        """One of its fields, which must be there."""
        value = getattr(self, name)
        if value is None:
            raise InvalidRequestError(f"{place}.{name} is missing; a block of type {self.type} must have it")
        return value


class MessageItem(Known):
    """One message of the conversation."""

    role: str
    content: str | Items[ContentBlock]


class MessageTool(Known):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: Items[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = {"type": "object", **(self.input_schema or {})}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class MessageToolChoice(Known):
    """Tools that the model must or may call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> Any:
        """The choice as a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.type not in ("auto", "any", "tool", "none"):
            yield f"tool_choice.type is {shown(self.type)}; it must be auto, any, tool or none"
        if self.type == "tool" and not self.name:
            yield "tool_choice.name is missing; it must name one of the tools"


class MessageOutput(TextForm):
    """Wishes about the answer."""

    effort: str | None = None
    """A variable for the model's template."""


class MessageThinking(Known):
    """How far the model thinks before it answers."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None

    @property
    def variables(self) -> dict[str, bool]:
        """Variables for templates that can turn thinking on and off, by the two names that they have for it."""
        if self.type == "adaptive":
            return {}
        return dict.fromkeys(("enable_thinking", "thinking"), self.type == "enabled")

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.type not in ("enabled", "disabled", "adaptive"):
            yield f"thinking.type is {shown(self.type)}; it must be enabled, disabled or adaptive"


class Conversation(ChatDialect):
    """The part of a body of Anthropic's that makes the prompt."""

    messages: Items[MessageItem]
    """The conversation: text, tools that were used, their results, and thinking. The answer goes on with a last message
    of the assistant's."""
    system: str | Items[ContentBlock] | None = None
    """A system message before it."""
    tools: Items[MessageTool] | None = None
    """Functions that the model may call. Ignored with a `tool_choice` of `none`."""
    tool_choice: MessageToolChoice | None = None
    """`auto` (the default with tools), `any`, `tool` with a name, or `none`."""
    thinking: MessageThinking | None = None
    """`enabled` and `disabled` are told to the model's template. `budget_tokens` is ignored."""
    output_config: MessageOutput | None = None
    """`effort` is a variable for the model's template, `format` the text's form."""
    cache_control: dict[str, Any] | None = None
    """Accepted: every prefix is cached."""
    context_management: Any = only(because="this coordinator does not shorten prompts")
    mcp_servers: Any = only([], because="this coordinator calls no tools itself")
    container: Any = only(because="this coordinator runs no code")

    @property
    def unused(self) -> dict[str, bool]:
        return {
            "tools": bool(self.tools) and self.tool_choice is not None and self.tool_choice.type == "none",
            "thinking.budget_tokens": self.thinking is not None and self.thinking.budget_tokens is not None,
        }

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        for part in (self.tool_choice, self.thinking):
            if part is not None:
                yield from part.refusals()
        if self.output_config is not None:
            yield from (f"output_config.{sentence}" for sentence in self.output_config.refusals())
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                kind = shown(tool.type)
                yield f'tools.{index}.type is {kind}; it must be "custom": this coordinator calls no tools itself'

    def chat(self) -> ChatBody:
        choice = self.tool_choice
        thinking = self.thinking
        output = self.output_config
        messages = self._chat_messages()
        return self.make_chat(
            messages,
            {} if thinking is None else thinking.variables,
            tools=[tool.as_chat() for tool in self.tools] if self.tools else None,
            tool_choice=None if choice is None else choice.as_chat(),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            response_format=None if output is None else output.response_format,
            reasoning_effort=None if output is None else output.effort,
            continue_final_message=_is_open(messages[-1]) if messages else False,
        )

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system is not None and (text := _system_text("system", self.system)):
            messages.append({"role": "system", "content": text})
        for index, message in enumerate(self.messages):
            place = f"messages.{index}"
            match message.role:
                case "system":
                    messages.append({"role": "system", "content": _system_text(place, message.content)})
                case "user":
                    messages += _user_messages(place, message.content)
                case "assistant":
                    messages.append(_assistant_message(place, message.content))
                case _:
                    raise InvalidRequestError(
                        f"{place}.role is {shown(message.role)}; it must be user, assistant or system"
                    )
        return messages


class MessagesBody(Conversation):
    """`POST /v1/messages`."""

    max_tokens: int
    """Maximum tokens; 400 if there is no room for that many."""
    stop_sequences: Items[str] | None = None
    """Strings that end the completion."""
    metadata: dict[str, Any] | None = None
    """Accepted, without effect."""

    def chat(self) -> ChatBody:
        return super().chat().model_copy(update={"max_tokens": self.max_tokens, "stop": self.stop_sequences})


class CountTokensBody(Conversation):
    """`POST /v1/messages/count_tokens`."""


def _is_open(message: dict[str, Any]) -> bool:
    """True for a last message that the answer goes on with."""
    return message["role"] == "assistant" and "tool_calls" not in message and bool(message["content"])


def _system_text(place: str, content: str | list[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _unreadable(f"{place}.{index}", block, "text")
        text = block.field(f"{place}.{index}", "text")
        if not text.startswith(_BILLING):
            texts.append(text)
    return "\n".join(texts)


def _user_messages(place: str, content: str | list[ContentBlock]) -> Iterator[dict[str, Any]]:
    """The results of tools, which follow their calls, and then the text."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts = []
    for index, block in enumerate(content):
        at = f"{place}.content.{index}"
        match block.type:
            case "text":
                texts.append(block.field(at, "text"))
            case "tool_result":
                result = as_one_text(at, block.content or "")
                yield {"role": "tool", "tool_call_id": block.field(at, "tool_use_id"), "content": result}
            case _:
                raise _unreadable(at, block, "text or tool_result")
    if texts or not content:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant_message(place: str, content: str | list[ContentBlock]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts = []
    thoughts = []
    calls = []
    for index, block in enumerate(content):
        at = f"{place}.content.{index}"
        match block.type:
            case "text":
                texts.append(block.field(at, "text"))
            case "thinking":
                thoughts.append(block.field(at, "thinking"))
            case "redacted_thinking":
                pass  # another server has made it, and nobody can read it
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": block.field(at, "name"), "arguments": arguments}
                calls.append({"id": block.field(at, "id"), "type": "function", "function": function})
            case _:
                raise _unreadable(at, block, "text, thinking or tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _unreadable(place: str, block: ContentBlock, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}.type is {shown(block.type)}; it must be {wanted}: the model reads nothing else"
    )


# ---- from blocks to content


class MessagesAnswer(BlockAnswer):
    """An answer of `/v1/messages`."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        assert asked.prompt_tokens is not None
        (self._prompt_tokens,) = asked.prompt_tokens
        self._head = {
            "id": f"msg_{asked.request_id}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
        }

    def whole(self) -> dict[str, Any]:
        return {**self._head, "content": [*map(_content, self.blocks)], **self._outcome(), **self._account()}

    def failure(self, error: TandemError) -> bytes:
        return event_line(anthropic_error_object(error))

    def _begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event_line({"type": "message_start", "message": {**self._head, **nothing}})

    def _change(self, change: Change) -> Iterator[bytes]:
        block = change.block
        match change.moment:
            case Moment.BEGAN:
                begun = _content(Block(block.kind, block.index, block.call_id, block.function))
                begun |= {"signature": ""} if block.kind is BlockKind.REASONING else {}
                yield event_line(
                    {"type": "content_block_start", "index": block.index, "content_block": begun}
                )
            case Moment.GREW:
                kind, name = _DELTAS[block.kind]
                yield _delta(block, kind, name, change.piece)
            case Moment.ENDED:
                if block.kind is BlockKind.REASONING:
                    yield _delta(block, "signature_delta", "signature", block.id)
                yield event_line({"type": "content_block_stop", "index": block.index})

    def _end(self) -> Iterator[bytes]:
        yield event_line({"type": "message_delta", "delta": self._outcome(), **self._account()})
        yield event_line({"type": "message_stop"})

    def _outcome(self) -> dict[str, str | None]:
        summary = self.choices[0].summary
        assert summary is not None
        calls = [block for block in self.blocks if block.kind is BlockKind.CALL]
        sequence = summary.stop_reason if isinstance(summary.stop_reason, str) else None
        if self.is_cut:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if calls and (sequence is None or _is_object(calls[-1].text)):
            # A stop sequence may have cut the last call, and then it is not to be run.
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _account(self) -> dict[str, Any]:
        account = self.account()
        usage = account.pop("usage")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "usage": {
                # Anthropic counts the cached tokens apart.
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": thought},
            },
            **account,
        }


_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""Type and field of what a block grows by."""


def _delta(block: Block, kind: str, name: str, piece: str) -> bytes:
    delta = {"type": kind, name: piece}
    return event_line({"type": "content_block_delta", "index": block.index, "delta": delta})


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.REASONING:
            # Anthropic's own is a signature of the thinking; here nobody checks it.
            return {"type": "thinking", "thinking": block.text, "signature": block.id}
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.CALL:
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.function,
                "input": _arguments(block.text),
            }


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object. Of one that was cut, those that are there; text that is no object stands
    under a name of its own, so that the caller sees it."""
    if not text:
        return {}
    try:
        arguments = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text), dict)
    except ValueError:
        return False
