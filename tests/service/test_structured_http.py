"""Structured output, tools, echoed prompts and log probabilities over HTTP, through OpenAI's own client."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.end_to_end.models import random_model
from tests.paths import DEMO_TARGET
from tests.service.engines import TINY
from tests.service.http_cluster import MakeApi

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


def options(**more: Any) -> Any:
    return {"model": "m", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 120, **more}


def assert_city(text: str) -> None:
    value = json.loads(text)
    assert value["city"] in ("Oslo", "Køge")
    assert 1 <= value["days"] <= 9


async def test_a_response_format_is_kept_to(api: MakeApi) -> None:
    async with api() as client:
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
async def test_demanded_calls_are_made(api: MakeApi, choice: Any) -> None:
    async with api() as client:
        asked = options(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        answer = await client.chat.completions.create(**asked)
        (found,) = answer.choices
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        (call,) = found.message.tool_calls or []
        if call.function.name == "weather":
            assert_city(call.function.arguments)
        stream = await client.chat.completions.create(**asked, stream=True)
        name = ""
        arguments = ""
        reason = None
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


async def test_usage_tells_how_much_of_a_prompt_was_cached(api: MakeApi) -> None:
    asked: Any = {"model": "m", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    async with api() as client:
        first, again = [(await client.completions.create(**asked)).usage for _ in range(2)]
    assert first is not None
    assert first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert len(PROMPT) / 2 < (again.prompt_tokens_details.cached_tokens or 0) < len(PROMPT)


PROMPT = [300 + 7 * index % 900 for index in range(70)]
"""More than are verified at a time."""
TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
SCORED: dict[str, Any] = {
    "model": "m",
    "temperature": 0,
    "prompt": PROMPT,
    "echo": True,
    "logprobs": 1,
    "seed": 1234,
}


def expected(token_ids: list[int]) -> torch.Tensor:
    """By transformers: log probabilities of each next token, [len(token_ids), vocabulary_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = random_model(1, **TINY)(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_is_scored_beside_a_draft(api: MakeApi, max_tokens: int) -> None:
    async with api() as client:
        answer = await client.completions.create(**SCORED, max_tokens=max_tokens)
        stream = await client.completions.create(**SCORED, max_tokens=max_tokens, stream=True)
        pieces = [piece.choices[0] async for piece in stream]
    (choice,) = answer.choices
    assert choice.logprobs is not None
    said = choice.logprobs.token_logprobs or []
    tops = choice.logprobs.top_logprobs or []
    assert len(said) == len(tops) == len(PROMPT) + max_tokens
    assert said[0] is tops[0] is None
    rows = expected(PROMPT)
    for i, token_id in enumerate(PROMPT[1:]):
        assert said[i + 1] == pytest.approx(float(rows[i, token_id]), abs=1e-4)
        assert max(tops[i + 1].values()) == pytest.approx(float(rows[i].max()), abs=1e-4)
    assert choice.text.startswith(TOKENIZER.decode(PROMPT))
    assert (choice.logprobs.text_offset or [])[-1] <= len(choice.text)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), max_tokens)
    assert "".join(piece.text for piece in pieces) == choice.text
    streamed = [each for piece in pieces if piece.logprobs for each in piece.logprobs.token_logprobs or []]
    assert streamed == said


async def test_an_echo_is_followed_by_the_targets_text(api: MakeApi) -> None:
    asked: Any = {"model": "m", "prompt": "def f(", "max_tokens": 6, "temperature": 0, "echo": True}
    alone: Any = {"extra_body": {"speculation": False}}
    async with api(compatibility="max") as client:
        with pytest.raises(openai.BadRequestError, match="echo is true and a draft proposes"):
            await client.completions.create(**asked)
        as_max = await client.completions.create(**asked, **alone)
    async with api() as client:
        echoed = await client.completions.create(**asked)
        assert echoed.choices[0].text == as_max.choices[0].text
        plain = await client.completions.create(**asked | {"echo": False}, **alone)
        assert echoed.choices[0].text == "def f(" + plain.choices[0].text
        end: Any = {"logit_bias": {"0": 100}, "max_tokens": 2, "echo": False}
        special: Any = {"extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
        marked = await client.completions.create(**asked | end, **special)
        assert marked.choices[0].text == 2 * (TOKENIZER.id_to_token(0) or "")
        with pytest.raises(openai.BadRequestError, match="max_tokens is 0; it must be at least 1"):
            await client.completions.create(**asked | {"echo": False, "max_tokens": 0})
        scores: list[Any] = []
        for others in ({}, {"logit_bias": json.loads('{"5": 90}')}):
            scored = await client.completions.create(**SCORED, max_tokens=1, **others)
            logprobs = scored.choices[0].logprobs
            assert logprobs is not None
            scores.append(logprobs.token_logprobs)
        first, second = scores
        assert first[:-1] == second[:-1], "a bias is for the completion"
        assert first[-1] != second[-1]


LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"enum": ["Oslo", "Køge"]},
    {"type": "boolean"},
    {"type": "string", "pattern": "^[a-f]{3}$"},
    {"type": "array", "items": {"const": "x"}, "minItems": 1, "maxItems": 2},
]


def by_definition(leaf: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": {"$ref": "#/$defs/value"}}, "required": ["a"], "$defs": {"value": leaf}}


def by_older_definition(leaf: dict[str, Any]) -> dict[str, Any]:
    parameters = {"properties": {"a": {"$ref": "#/definitions/value"}}, "required": ["a"]}
    older = {"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"value": leaf}}
    return parameters | older


def by_property(leaf: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": leaf, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]}


def by_root(leaf: dict[str, Any]) -> dict[str, Any]:
    return {
        "properties": {"a": leaf, "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["a", "more"],
    }


async def test_references_are_resolved_within_the_schema_of_their_tool(api: MakeApi) -> None:
    """Two tools at a time refer by the same names to different schemas."""
    called = set()
    async with api() as client:
        for number, (shape, index) in enumerate(
            itertools.product((by_definition, by_older_definition, by_property, by_root), range(10))
        ):
            leaves = LEAVES[index % 5], LEAVES[(index + 1 + index // 5) % 5]
            schemas = {
                f"f{place}": {"type": "object", **shape(leaf), "additionalProperties": False}
                for place, leaf in enumerate(leaves)
            }
            tools = [
                {"type": "function", "function": {"name": name, "parameters": parameters}}
                for name, parameters in schemas.items()
            ]
            asked = options(tools=tools, tool_choice="required", parallel_tool_calls=False, seed=number)
            found = []
            for own in ({"speculation": False}, {}):
                body = {"rejection_sampling_strategy": "strict", **own}
                sampled = asked | {"temperature": number % 2, "extra_body": body}
                answer = await client.chat.completions.create(**sampled)
                assert answer.choices[0].finish_reason == "tool_calls"
                assert answer.choices[0].message.content is None
                (call,) = answer.choices[0].message.tool_calls or []
                jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
                found.append((call.function.name, call.function.arguments))
            assert found[0] == found[1]
            called.add(found[0][0])
    assert called == {"f0", "f1"}
