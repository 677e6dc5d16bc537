"""Structured output and tools over HTTP, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.engine.models.loading import LoadedModel
from tests.service.engines import Faults, draft, target
from tests.service.fakes import settings_for
from tests.service.http_cluster import http_coordinator
from tests.service.http_cluster import openai as client_of

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
)
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Køge"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
MESSAGES: Any = [{"role": "user", "content": "How is it in Oslo?"}]
SECONDS = 120.0


@asynccontextmanager
async def cluster(
    model: LoadedModel, other_model: LoadedModel, folder: Path, **options: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(target(model, Faults()))
        draft_address, _ = await stack.enter_async_context(draft(other_model))
        own: dict[str, Any] = {"http_port": 0, "chat_template": template, "served_model_name": "m"}
        settings = settings_for(target_address, draft_address, **own, **options)
        served = await stack.enter_async_context(http_coordinator(settings))
        yield await stack.enter_async_context(client_of(served, timeout=SECONDS))


def options(**more: Any) -> Any:
    return {"model": "m", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 120, **more}


def assert_city(text: str) -> None:
    value = json.loads(text)
    assert value["city"] in ("Oslo", "Køge")
    assert 1 <= value["days"] <= 9


async def test_a_response_format_is_kept_to(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path
) -> None:
    async with cluster(model, other_model, tmp_path) as client:
        answer = await client.chat.completions.create(**options(response_format=FORMAT))
        assert_city(answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(**options(response_format=FORMAT, stream=True))
        pieces = [piece.choices[0].delta.content or "" async for piece in stream]
        assert "".join(pieces) == answer.choices[0].message.content
        response = await client.responses.create(
            model="m",
            input="a city",
            text={"format": {"type": "json_schema", "name": "city", "schema": CITY}},
        )
        assert_city(response.output_text)
        for form, texts in (({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "[xy]"}, ("x", "y"))):
            plain = await client.completions.create(
                model="m", prompt="Is it?", extra_body={"structured_outputs": form}
            )
            assert plain.choices[0].text in texts
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
            await client.completions.create(
                model="m", prompt="x", extra_body={"guided_json": {"type": "array", "uniqueItems": True}}
            )


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_demanded_calls_are_made(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path, choice: Any
) -> None:
    async with cluster(model, other_model, tmp_path) as client:
        asked = options(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        answer = await client.chat.completions.create(**asked)
        (found,) = answer.choices
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        (call,) = found.message.tool_calls or []
        if call.function.name == "weather":
            assert_city(call.function.arguments)
        stream = await client.chat.completions.create(**asked, stream=True)
        name, arguments, reason = "", "", None
        async for piece in stream:
            (streamed,) = piece.choices
            reason = streamed.finish_reason or reason
            for delta in streamed.delta.tool_calls or []:
                assert delta.index == 0
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")
        more = [
            *MESSAGES,
            found.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "mild"},
        ]
        after = await client.chat.completions.create(**options(tools=TOOLS, messages=more, max_tokens=4))
        assert after.usage is not None
        assert after.usage.prompt_tokens > (answer.usage.prompt_tokens if answer.usage else 0)


async def test_what_is_refused(model: LoadedModel, other_model: LoadedModel, tmp_path: Path) -> None:
    async with cluster(model, other_model, tmp_path, structured_output="refuse") as client:
        for more in ({"response_format": FORMAT}, {"tools": TOOLS}):
            with pytest.raises(openai.BadRequestError, match="structured_output is refuse"):
                await client.chat.completions.create(**options(**more))
        await client.chat.completions.create(**options(tools=TOOLS, tool_choice="none", max_tokens=2))
