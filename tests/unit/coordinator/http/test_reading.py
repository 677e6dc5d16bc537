"""The forms that a chat's answer is read in, by its request and its model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tandem_coordinator.http.chat import Chats
from tandem_coordinator.http.reading import AnswerForms
from tandem_coordinator.http.schema import ChatBody
from tandem_coordinator.parsers.forms import CALL_PARSERS, DEMANDED, HARMONY, REASONING_PARSERS
from tests.paths import DEMO_TARGET

ASK = [{"role": "user", "content": "How?"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
THINKING = "{{ '[TOOL_CALLS][THINK]' }}"


async def chats(source: str, **parsers: str) -> AsyncIterator[Chats]:
    made = Chats(None, **parsers)
    await made.meet("m", {"chat_template.jinja": source.encode()}, is_checked=False)
    yield made
    made.close()


async def forms(source: str, parsers: dict[str, str] | None = None, **fields: Any) -> AnswerForms:
    """The forms of a chat with these fields, by a template."""
    body = ChatBody.model_validate_json(json.dumps({"messages": ASK} | fields))
    async for made in chats(source, **(parsers or {})):
        return AnswerForms.of(body, body.grammar, made)
    raise AssertionError


@pytest.mark.parametrize(
    ("source", "fields", "calls"),
    [
        (THINKING, {}, None),
        (THINKING, {"tools": TOOLS}, CALL_PARSERS["mistral"]),
        (THINKING, {"tools": TOOLS, "tool_choice": "none"}, None),
        (THINKING, {"tools": TOOLS, "tool_choice": "required"}, DEMANDED),
        ("<|channel|>", {}, HARMONY),
        ("<|channel|>", {"response_format": {"type": "json_object"}}, None),
    ],
)
async def test_calls_are_read_where_the_request_has_tools(source: str, fields: Any, calls: Any) -> None:
    found = await forms(source, **fields)
    assert found.calls is calls
    assert found.reasoning is REASONING_PARSERS["mistral" if source == THINKING else "openai_gptoss"]


async def test_nothing_is_read_where_nothing_is_expected() -> None:
    assert (await forms("plain")).is_empty
    assert not (await forms(THINKING)).is_empty
    assert (await forms(THINKING, {"reasoning_parser": "none"})).is_empty
    assert (await forms("plain", {"tool_call_parser": "none"}, tools=TOOLS)).is_empty


async def test_harmonys_reasoning_comes_with_its_calls() -> None:
    assert (await forms("plain", {"reasoning_parser": "openai_gptoss"})).calls is HARMONY


async def test_the_text_has_special_tokens_only_where_a_mark_is_one() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool_call>")])
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]"), AddedToken("</think>")])
    assert (await forms("[TOOL_CALLS]", tools=TOOLS)).has_special_tokens(tokenizer)
    assert not (await forms("[TOOL_CALLS]")).has_special_tokens(tokenizer)
    assert not (await forms("<tool_call>", tools=TOOLS)).has_special_tokens(tokenizer)
    assert (await forms("</think>")).has_special_tokens(tokenizer)
