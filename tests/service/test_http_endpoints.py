"""Endpoints other than completions and chats, CORS, and the report of ignored fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import TOKENIZER, http_cluster, openai, text

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 3}


async def test_responses_by_openais_client(template: Path) -> None:
    async with (
        http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster,
        openai(cluster) as client,
    ):
        fields: dict[str, Any] = {"model": "fake", "input": "a", "temperature": 0.0, "max_output_tokens": 5}
        answer = await client.responses.create(**fields, store=False)
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        instructed = await client.responses.create(
            model="fake",
            instructions="b",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            max_output_tokens=1,
        )
        await _refused(client, tools=[{"type": "function", "name": "f", "parameters": {}, "strict": True}])
        await _refused(client, previous_response_id="resp_1")
    first = TOKENIZER.encode("user: a\n").ids[-1] + 1
    assert answer.output_text == text(first, first + 4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    assert instructed.usage is not None
    assert instructed.usage.input_tokens == len(TOKENIZER.encode("system: b\nuser: a\n").ids)


async def _refused(client: AsyncOpenAI, **options: Any) -> None:
    with pytest.raises(BadRequestError, match=next(iter(options))):
        await client.responses.create(model="fake", input="a", **options)


async def test_tokenizing_and_back(template: Path) -> None:
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        ids = TOKENIZER.encode("def f():").ids
        answer = await cluster.http.post("/tokenize", json={"prompt": "def f():", "return_token_strs": True})
        assert answer.json() == {
            "count": len(ids),
            "max_model_len": 64,
            "tokens": ids,
            "token_strs": [TOKENIZER.id_to_token(token_id) for token_id in ids],
        }
        chat = await cluster.http.post("/tokenize", json={"messages": CHAT["messages"]})
        assert chat.json()["tokens"] == TOKENIZER.encode("user: a\n").ids
        back = await cluster.http.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "def f():"}
        for path, body, sentence in (
            ("/tokenize", {}, "prompt and messages are both set, or neither is"),
            ("/detokenize", {"tokens": [5000]}, "tokens holds token id 5000"),
            ("/detokenize", {"tokens": [1], "model": "other"}, "model is 'other'"),
        ):
            refused = await cluster.http.post(path, json=body)
            assert sentence in refused.json()["error"]["message"]


async def test_the_api_is_described() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        described = (await cluster.http.get("/openapi.json")).json()
        page = await cluster.http.get("/docs")
    assert described["openapi"].startswith("3.")
    schema = described["components"]["schemas"]["ChatBody"]
    assert "continue_final_message" in schema["properties"]
    assert set(described["paths"]) >= {"/v1/completions", "/v1/responses", "/tokenize", "/load"}
    assert "logit_bias" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert (
        "default-src 'none'; script-src 'self'; style-src 'self'" in page.headers["content-security-policy"]
    )


async def test_ignored_fields_are_reported(template: Path) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    tools: dict[str, Any] = {"tools": [function], "tool_choice": "none"}
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        for stream in (False, True):
            answer = await cluster.http.post(
                "/v1/chat/completions", json=CHAT | tools | {"foo": 1, "stream": stream}
            )
            assert answer.status_code == 200
            assert answer.headers["x-tandem-ignored"] == "foo, tools"
        plain = await cluster.http.post("/v1/chat/completions", json=CHAT)
        assert "x-tandem-ignored" not in plain.headers


async def test_the_finish_reason_is_reported() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        body: dict[str, Any] = {"prompt": [10], "temperature": 0, "max_tokens": 20}
        for more, reason, count in (
            ({"stop_token_ids": [15]}, 15, 5),
            ({"stop": [text(13, 14)]}, text(13, 14), 4),
            ({}, None, 20),
        ):
            answer = (await cluster.http.post("/v1/completions", json=body | more)).json()
            assert answer["choices"][0]["stop_reason"] == reason
            assert answer["usage"]["completion_tokens"] == count
        late = (await cluster.http.post("/v1/completions", json=body | {"max_tokens": 64})).json()
        assert late["error"]["message"].startswith("max_tokens is 64; it must be at most 63")


async def test_penalties_may_leave_the_draft_out() -> None:
    draft = FakeDraft()
    body: dict[str, Any] = {"prompt": [10], "temperature": 0, "max_tokens": 9, "presence_penalty": 0.5}
    async with http_cluster(FakeTarget(), draft) as cluster:
        said = await cluster.http.post("/v1/completions", json=body)
        assert said.headers["x-tandem-target-alone"] == "presence_penalty"
        answer = said.json()
        assert answer["choices"][0]["text"] == text(11, 19)
        assert answer["speculation"]["drafted"] == 0
        assert (
            answer["speculation"]["state"]["reason"] == "a request with penalties leaves the draft model out"
        )
        assert draft.opened == 0
        for more in ({"presence_penalty": 0}, {"speculation": False}):
            plain = await cluster.http.post("/v1/completions", json=body | more)
            assert "x-tandem-target-alone" not in plain.headers
            assert (plain.json()["speculation"]["drafted"] > 0) == ("speculation" not in more)
    async with http_cluster(FakeTarget(), FakeDraft(), compatibility="max") as cluster:
        for refused in (body, {"prompt": [10], "structured_outputs": {"regex": "a"}}):
            answer = await cluster.http.post("/v1/completions", json=refused)
            assert answer.status_code == 400
            assert "draft model" in answer.text or "structured_output is refuse" in answer.text


async def test_other_origins_are_admitted_only_by_name() -> None:
    origin = "https://chat.example"
    fields = {"origin": origin, "access-control-request-method": "POST"}
    async with http_cluster(FakeTarget()) as cluster:
        assert (await cluster.http.options("/v1/completions", headers=fields)).status_code == 405
        assert (
            "access-control-allow-origin"
            not in (await cluster.http.get("/version", headers={"origin": origin})).headers
        )
    async with http_cluster(FakeTarget(), cors_origin=f"{origin},http://localhost:3000") as cluster:
        allowed = await cluster.http.options("/v1/completions", headers=fields)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        answer = await cluster.http.get("/version", headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        other = await cluster.http.options(
            "/v1/completions", headers=fields | {"origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers


async def test_the_usage_so_far_comes_with_each_piece() -> None:
    async with http_cluster(FakeTarget()) as cluster, openai(cluster) as client:
        stream = await client.completions.create(
            model="fake",
            prompt=["a", "def f():"],
            max_tokens=5,
            temperature=0,
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        pieces = [piece async for piece in stream]
    *parts, last = [(piece.choices[0].index if piece.choices else None, piece.usage) for piece in pieces]
    prompts = [len(TOKENIZER.encode(prompt).ids) for prompt in ("a", "def f():")]
    for index in (0, 1):
        usages = [usage for of, usage in parts if of == index and usage]
        assert [usage.completion_tokens for usage in usages] == [1, 2, 3, 4, 5]
        assert {usage.prompt_tokens for usage in usages} == {prompts[index]}
    assert last[1] is not None
    assert last[1].prompt_tokens == sum(prompts)


async def test_a_client_may_name_its_request() -> None:
    body = {"prompt": "a", "max_tokens": 2, "request_id": "mine"}
    async with http_cluster(FakeTarget()) as cluster:
        plain, same = [await cluster.http.post("/v1/completions", json=body) for _ in range(2)]
        named = await cluster.http.post("/v1/completions", json=body, headers={"x-request-id": "a b/c"})
        wrong = await cluster.http.get("/v2", headers={"x-request-id": "lost"})
    assert plain.json()["id"].startswith("cmpl-mine-")
    assert plain.json()["id"] != same.json()["id"]
    assert plain.headers["x-request-id"] != same.headers["x-request-id"]
    assert named.json()["id"].startswith("cmpl-a?b?c-")
    assert named.headers["x-request-id"] == "a b/c"
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (404, "lost")
