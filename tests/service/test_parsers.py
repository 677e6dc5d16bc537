"""Calls and reasoning of models in forms that their template, or an option, names, over HTTP."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.fakes import FakeTarget
from tests.service.http_cluster import TOKENIZER, HttpCluster, http_cluster, openai
from tests.service.test_dialects import ASK, MAX_LENGTH, TEMPLATE, cluster_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "Køge", "days": 2}
MISTRAL = f"Let me look.[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}"
GLM = (
    "Let me look.<tool_call>weather\n<arg_key>city</arg_key><arg_value>Køge</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)


async def answered(cluster: HttpCluster, **more: Any) -> tuple[Any, str, str]:
    """The message of a chat's answer, and its reasoning and content as they are streamed."""
    body: Any = {"model": "fake", "messages": [ASK], "max_tokens": 150, "temperature": 0, **more}
    async with openai(cluster) as client:
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True)
        deltas = [piece.choices[0].delta async for piece in stream]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    (choice,) = whole.choices
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(call.function.arguments for call in calls) == "".join(
        call.function.arguments for call in choice.message.tool_calls or []
    )
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    return choice.message, reasoning, content


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        ("[TOOL_CALLS]", {}, MISTRAL),
        ("<arg_key>", {}, GLM),
        ("<tool_call>", {"tool_call_parser": "glm45"}, GLM),
        ("<tool_call>", {"tool_call_parser": "mistral"}, MISTRAL),
    ],
)
async def test_calls_in_the_form_of_the_template_or_of_the_option(
    template: str, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    source = f"{{% set marks = '{template}' %}}{TEMPLATE}"
    async with cluster_of(tmp_path, text, template=source, **options) as cluster:
        message, _, content = await answered(cluster, tools=TOOLS)
    assert message.content == content == "Let me look."
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)


async def test_no_calls_are_read_where_the_option_says_so(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, GLM, tool_call_parser="none") as cluster:
        message, _, content = await answered(cluster, tools=TOOLS)
    assert message.content == content == GLM


THINKING = "{% set marks = '</think>' %}" + TEMPLATE
REASONED = "<think>It is March.</think>Mild."


async def test_reasoning_is_apart_from_the_content(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, REASONED, template=THINKING) as cluster:
        message, reasoning, content = await answered(cluster)
        assert (message.reasoning_content, message.content) == (reasoning, content)
        assert getattr(message, "reasoning", "") == reasoning
        assert (reasoning, content) == ("It is March.", "Mild.")
        message, reasoning, content = await answered(cluster, extra_body={"include_reasoning": False})
        assert not hasattr(message, "reasoning_content")
        assert (message.content, reasoning, content) == ("Mild.", "", "Mild.")
    async with cluster_of(tmp_path, REASONED, template=THINKING, reasoning_parser="none") as cluster:
        message, reasoning, content = await answered(cluster)
        assert (message.content, reasoning, content) == (REASONED, "", REASONED)
    async with cluster_of(tmp_path, "It is March.</think>Mild.", reasoning_parser="deepseek_r1") as cluster:
        assert (await answered(cluster))[1:] == ("It is March.", "Mild.")


@pytest.mark.parametrize(
    ("ending", "text", "reasoning", "content"),
    [
        ("@@<think>", "It is March.</think>Mild.", "It is March.", "Mild."),
        ("@@<think></think>", "<think> is a mark.", "", "<think> is a mark."),
    ],
)
async def test_the_prompt_may_have_begun_or_ended_the_reasoning(
    ending: str, text: str, reasoning: str, content: str, tmp_path: Path
) -> None:
    script = [*TOKENIZER.encode(text).ids, 0]

    def write(tokens: Any) -> int:
        lengths = range(len(tokens) + 1)
        prompt = bisect_left(
            lengths, True, key=lambda length: ending in TOKENIZER.decode(list(tokens[:length]))
        )
        return [*script, *[0] * MAX_LENGTH][len(tokens) - prompt]

    target = FakeTarget(write, (0,))
    target.model_info = replace(target.model_info, max_length=MAX_LENGTH)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("@@", ending))
    options: dict[str, Any] = {"chat_template": template, "reasoning_parser": "qwen3"}
    async with http_cluster(target, **options) as cluster:
        assert (await answered(cluster))[1:] == (reasoning, content)


async def test_an_answer_that_is_continued_goes_on_with_its_reasoning(tmp_path: Path) -> None:
    own = {"role": "assistant", "content": "<think>It is@@"}
    more: Any = {
        "messages": [ASK, own],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    async with cluster_of(tmp_path, " March.</think>Mild.", template=THINKING) as cluster:
        assert (await answered(cluster, **more))[1:] == (" March.", "Mild.")
