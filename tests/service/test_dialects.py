"""Anthropic's Messages and OpenAI's Responses, by their own clients, of a model that writes what a test says."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import SECONDS, TOKENIZER, HttpCluster, http_cluster, openai

MARK = "@@"
"""Ends the prompt of a chat."""
TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}@@{% endif %}"
)
MAX_LENGTH = 400
CALL = '{"name": "weather", "arguments": {"city": "Køge", "days": 2}}'
ARGUMENTS = {"city": "Køge", "days": 2}
CALLS = f"Let me look.<tool_call>{CALL}</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "tells it", "input_schema": PARAMETERS}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
ASK: Any = {"role": "user", "content": "How is it?"}


def prompt_length(tokens: Sequence[int]) -> int:
    """The number of tokens that the prompt has, which ends with a mark."""
    lengths = range(len(tokens) + 1)
    return bisect_left(lengths, True, key=lambda length: MARK in TOKENIZER.decode(list(tokens[:length])))


def writing(text: str) -> Any:
    """A model that answers each chat with a text, and then ends."""
    script = [*TOKENIZER.encode(text).ids, 0]
    return lambda tokens: [*script, *[0] * MAX_LENGTH][len(tokens) - prompt_length(tokens)]


@asynccontextmanager
async def cluster_of(tmp_path: Path, text: str, **options: Any) -> AsyncIterator[HttpCluster]:
    template = tmp_path / "template.jinja"
    template.write_text(options.pop("template", TEMPLATE))
    target = FakeTarget(writing(text), (0,))
    draft = FakeDraft(writing(text))
    for fake in (target, draft):
        fake.model_info = replace(fake.model_info, max_length=MAX_LENGTH)
    async with http_cluster(target, draft, chat_template=template, **options) as cluster:
        yield cluster


@asynccontextmanager
async def messages_client(cluster: HttpCluster, **changes: Any) -> AsyncIterator[AsyncAnthropic]:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": SECONDS} | changes
    async with AsyncAnthropic(base_url=cluster.url, **options) as client:
        yield client


def asked(**more: Any) -> Any:
    """Fields of a request. Anthropic's client has no temperature of its own."""
    more["extra_body"] = {"temperature": 0.0, **more.get("extra_body", {})}
    return {"model": "fake", "max_tokens": 100, "messages": [ASK], **more}


def plain(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Blocks without what is made up for each answer."""
    made_up = ("id", "call_id", "signature")
    return [
        {name: value for name, value in block.to_dict().items() if name not in made_up} for block in blocks
    ]


async def streamed(client: AsyncAnthropic, **options: Any) -> tuple[anthropic.types.Message, list[str]]:
    """The message that the client makes of the events, and their types."""
    async with client.messages.stream(**options) as stream:
        kinds: list[str] = [event.type async for event in stream]
        return await stream.get_final_message(), kinds


async def test_a_message_by_anthropics_client(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "Mild and dry.") as cluster, messages_client(cluster) as client:
        whole = await client.messages.create(**asked(system="You tell it."))
        piecewise, kinds = await streamed(client, **asked(system="You tell it."))
        cut = await client.messages.create(**asked(max_tokens=2))
        stopped = await client.messages.create(**asked(stop_sequences=[" and"]))
        counted = await client.messages.count_tokens(model="fake", system="You tell it.", messages=[ASK])
        gone_on = await client.messages.create(
            **asked(messages=[ASK, {"role": "assistant", "content": "Answer: @@"}])
        )
    assert plain(whole.content) == [{"type": "text", "text": "Mild and dry."}]
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", "fake", "end_turn")
    assert plain(piecewise.content) == plain(whole.content)
    assert piecewise.usage.output_tokens == whole.usage.output_tokens > 3
    prompt = len(TOKENIZER.encode("system: You tell it.\nuser: How is it?\n@@").ids)
    assert whole.usage.input_tokens == piecewise.usage.input_tokens == counted.input_tokens == prompt
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " and")
    assert plain(stopped.content) == [{"type": "text", "text": "Mild"}]
    # The last message is the beginning of the answer, so that nothing follows it in the prompt.
    expected = len(TOKENIZER.encode("user: How is it?\nassistant: Answer: @@").ids)
    assert gone_on.usage.input_tokens == expected
    assert plain(gone_on.content) == [{"type": "text", "text": "Mild and dry."}]


async def test_a_message_with_tools(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, CALLS) as cluster, messages_client(cluster) as client:
        whole = await client.messages.create(**asked(tools=[WEATHER]))
        piecewise, kinds = await streamed(client, **asked(tools=[WEATHER]))
        cut = await client.messages.create(**asked(tools=[WEATHER], stop_sequences=["ge"]))
        said = await client.messages.create(**asked(tools=[WEATHER], tool_choice={"type": "none"}))
        (call,) = [block for block in whole.content if block.type == "tool_use"]
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "mild"}],
        }
        more: list[Any] = [
            ASK,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
        ]
        after = await client.messages.count_tokens(model="fake", messages=more)
    assert plain(whole.content) == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "weather", "input": ARGUMENTS},
    ]
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    assert plain(piecewise.content) == plain(whole.content)
    assert piecewise.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    # A call that a stop sequence has cut is not to be run.
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "ge")
    assert plain(cut.content)[-1]["input"] == {"city": "Kø"}
    assert plain(said.content) == [{"type": "text", "text": CALLS}]
    conversation = "user: How is it?\nassistant: Let me look.<tool_call>Køge\ntool: mild\nuser: And?\n@@"
    assert after.input_tokens == len(TOKENIZER.encode(conversation).ids)


async def test_thinking_of_earlier_messages_reaches_the_template(tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": "It is March.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    own: Any = {"role": "assistant", "content": [thought, redacted, {"type": "text", "text": "Mild."}]}
    async with cluster_of(tmp_path, "Yes.") as cluster, messages_client(cluster) as client:
        counted = await client.messages.count_tokens(
            model="fake", messages=[ASK, own, ASK], thinking={"type": "disabled"}
        )
        answer = await client.messages.with_raw_response.create(
            **asked(thinking={"type": "enabled", "budget_tokens": 1024})
        )
    conversation = "thinking: False\nuser: How is it?\nassistant: (It is March.) Mild.\nuser: How is it?\n@@"
    assert counted.input_tokens == len(TOKENIZER.encode(conversation).ids)
    assert answer.headers["x-tandem-ignored"] == "thinking.budget_tokens"


HARMONY = "{% set marks = '<|channel|>' %}" + TEMPLATE
REASONED = (
    "<|channel|>analysis<|message|>It is March.<|end|><|start|>assistant<|channel|>final<|message|>Mild."
)


async def test_reasoning_in_both(tmp_path: Path) -> None:
    async with (
        cluster_of(tmp_path, REASONED, template=HARMONY) as cluster,
        messages_client(cluster) as client,
        openai(cluster) as other,
    ):
        whole = await client.messages.create(**asked())
        piecewise, _ = await streamed(client, **asked())
        response = await other.responses.create(model="fake", input="How is it?", temperature=0)
        events, last = await responded(other, input="How is it?")
    spans = TOKENIZER.encode(REASONED).offsets
    thought = REASONED.index("It is"), REASONED.index("<|end|>")
    count = sum(thought[0] <= start < end <= thought[1] for start, end in spans)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == count > 1
    assert last.usage.output_tokens_details.reasoning_tokens == count
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == count
    content = [{"type": "thinking", "thinking": "It is March."}, {"type": "text", "text": "Mild."}]
    assert plain(whole.content) == plain(piecewise.content) == content
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or []] == ["It is March."]
    assert response.output_text == "Mild."
    assert plain(last.output) == plain(response.output)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "It is March."
    assert message.type == "message"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r'messages\.0\.content\.0\.type is "image"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, r'messages\.0\.role is "tool"'),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\.0\.content\.0\.text is missing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r'tools\.0\.type is "bash_20250124"'),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice is the function other"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, r'tool_choice\.type is "some"'),
        ({"thinking": {"type": "some"}}, r'thinking\.type is "some"'),
        ({"output_config": {"format": {"type": "xml"}}}, r'output_config\.format\.type is "xml"'),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 4000}, "max_tokens is 4000"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers is"),
        ({"extra_body": {"temperature": -1.0}}, "temperature is -1"),
    ],
)  # fmt: skip
async def test_what_a_message_cannot_have_is_named(tmp_path: Path, more: Any, sentence: str) -> None:
    async with cluster_of(tmp_path, "x") as cluster, messages_client(cluster) as client:
        with pytest.raises(anthropic.BadRequestError, match=sentence) as refused:
            await client.messages.create(**asked(**more))
        with pytest.raises(anthropic.BadRequestError, match=sentence):
            await client.messages.create(**asked(stream=True, **more))
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


async def test_errors_have_anthropics_form(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "x", auth_token="a-token-of-many-letters") as cluster:
        async with messages_client(cluster, api_key="another-token-of-many") as client:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await client.messages.create(**asked())
        async with messages_client(cluster, api_key="a-token-of-many-letters") as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**asked(model="other"))
            answer = await client.messages.create(**asked())
        by_bearer = {"api_key": None, "auth_token": "a-token-of-many-letters"}
        async with messages_client(cluster, **by_bearer) as client:
            await client.messages.create(**asked())
    kinds = [refused.value.body["error"]["type"] for refused in (unknown, missing)]  # type: ignore[index]
    assert kinds == ["authentication_error", "not_found_error"]
    assert answer.stop_reason == "end_turn"


async def test_a_message_that_fails_after_it_has_begun_ends_with_an_error(tmp_path: Path) -> None:
    def failing(tokens: Sequence[int]) -> int:
        written = len(tokens) - prompt_length(tokens)
        return 300 if written < 5 else 1 << 20

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    async with (
        http_cluster(FakeTarget(failing), chat_template=template, target_wait_seconds=0.1) as cluster,
        messages_client(cluster) as client,
    ):
        stream = aiter(await client.messages.create(**asked(max_tokens=20, stream=True)))
        first = await anext(stream)
        with pytest.raises(anthropic.APIStatusError) as failed:
            await anext(event async for event in stream if event.type == "message_stop")
    assert first.type == "message_start"
    assert failed.value.body["type"] == "error"  # type: ignore[index]


# ---- responses


async def responded(client: AsyncOpenAI, **options: Any) -> tuple[list[Any], Any]:
    """The events of a response, and the response in the last one."""
    stream = await client.responses.create(model="fake", temperature=0, stream=True, **options)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events, events[-1].response


async def test_a_response_with_functions(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, CALLS) as cluster, openai(cluster) as client:
        whole = await client.responses.create(model="fake", input=[ASK], tools=[FUNCTION], temperature=0)
        events, last = await responded(client, input=[ASK], tools=[FUNCTION])
        message, call = whole.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
        more: Any = [ASK, *[item.to_dict() for item in whole.output], result]
        after = await client.responses.create(model="fake", input=more, max_output_tokens=1)
        unused = await client.responses.create(
            model="fake", input=[ASK], tools=[FUNCTION], tool_choice="none", temperature=0
        )
    assert message.type == "message"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", ARGUMENTS, "completed")
    assert [tool.to_dict() for tool in whole.tools] == [FUNCTION]
    assert plain(last.output) == plain(whole.output)
    assert last.status == whole.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == call.arguments
    begun = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.arguments for item in begun if item.type == "function_call"] == [""], "they come as deltas"
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert plain(ended) == plain(whole.output)
    begun = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert begun == [item.id for item in ended] == [item.id for item in last.output]
    conversation = "user: How is it?\nassistant: Let me look.<tool_call>Køge\ntool: mild\n@@"
    assert after.usage is not None
    assert after.usage.input_tokens == len(TOKENIZER.encode(conversation).ids)
    assert unused.output_text == CALLS


async def test_reasoning_of_earlier_responses_reaches_the_template(tmp_path: Path) -> None:
    thought: Any = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "It is March."}],
    }
    said: Any = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "Mild.@@"}],
    }
    async with cluster_of(tmp_path, " Dry too.") as cluster, openai(cluster) as client:
        answer = await client.responses.with_raw_response.create(
            model="fake",
            input=[ASK, thought, said],
            reasoning={"effort": "none", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            temperature=0,
        )
        response = answer.parse()
    conversation = "thinking: False\nuser: How is it?\nassistant: (It is March.) Mild.@@"
    assert response.usage is not None
    assert response.usage.input_tokens == len(TOKENIZER.encode(conversation).ids)
    assert response.output_text == " Dry too."
    assert answer.headers["x-tandem-ignored"] == "include, reasoning.summary"


@pytest.mark.parametrize(
    ("written", "template", "shown"),
    [
        ("Mild and dry: Køge 🎉.", TEMPLATE, "Mild and dry: Køge 🎉."),
        (REASONED, HARMONY, "Mild."),
        (f"{CALLS} So be it.", TEMPLATE, "Let me look. So be it."),
    ],
)
async def test_the_log_probabilities_of_a_response_are_those_of_its_text(
    written: str, template: str, shown: str, tmp_path: Path
) -> None:
    more: Any = {
        "input": [ASK],
        "tools": [FUNCTION],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    async with cluster_of(tmp_path, written, template=template) as cluster, openai(cluster) as client:
        whole = await client.responses.create(model="fake", temperature=0, **more)
        events, last = await responded(client, **more)
        plainly = await client.responses.create(model="fake", temperature=0, input=[ASK], tools=[FUNCTION])
    parts = [part for item in whole.output if item.type == "message" for part in item.content]
    assert "".join(part.text for part in parts if part.type == "output_text") == shown
    for part in parts:
        assert part.type == "output_text"
        assert part.logprobs
        # A token at the border of a text may have more, such as the space before a call.
        assert part.text.strip() in b"".join(bytes(each.bytes) for each in part.logprobs).decode()
        assert all(each.top_logprobs[0].token == each.token for each in part.logprobs)
    assert plain(last.output) == plain(whole.output)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(event.logprobs for event in deltas)
    told = [entry.token for event in deltas for entry in event.logprobs]
    assert told == [
        entry.token for part in parts if part.type == "output_text" for entry in part.logprobs or ()
    ]
    assert plain(plainly.output) != plain(whole.output)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, r'input\.0\.type is "item_reference"; it must'),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, r"input\.0\.call_id is missing"),
        ({"input": [{"role": "user"}]}, r"input\.0\.content is missing"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, r"input\.0\.encrypted_content"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, r'tools\.0\.type is "web_search"; it must be "function"'),
        ({"input": "a", "tool_choice": "required"}, "tool_choice is required; tools must hold it"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include is"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs is 21"),
    ],
)  # fmt: skip
async def test_what_a_response_cannot_have_is_named(tmp_path: Path, more: Any, sentence: str) -> None:
    async with cluster_of(tmp_path, "x") as cluster, openai(cluster) as client:
        with pytest.raises(BadRequestError, match=sentence):
            await client.responses.create(model="fake", **more)
