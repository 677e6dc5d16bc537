"""The HTTP server over fake services: every path, every refusal, TLS, and disconnecting clients."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, RateLimitError

from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.model.types import SamplingDefaults
from tandem.v1 import target_pb2
from tandem_coordinator.http import bodies as reading
from tests.certificates import issued
from tests.service.clients import until
from tests.service.fakes import MAX_LENGTH, FakeDraft, FakeTarget, paced
from tests.service.http_cluster import SECONDS, TEMPLATE, TOKENIZER, http_cluster, openai, post, text


async def test_a_completion_by_openais_client() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster, openai(cluster) as client:
        models = await client.models.list()
        answer = await client.completions.create(
            model=models.data[0].id, prompt=[10], max_tokens=11, temperature=0.0, logprobs=2
        )
        assert (await client.models.retrieve("fake")).id == "fake"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text(11, 21), "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1
    assert answer.usage.completion_tokens == 11
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == 6
    assert details.rejected_prediction_tokens == 0
    assert answer.model_extra is not None
    assert answer.model_extra["speculation"]["acceptance_rate"] == 1.0
    as_vllm = answer.model_extra["metrics"]["speculative_decoding"]
    assert as_vllm["draft_acceptance_rate"] == 1.0
    assert sum(as_vllm["acceptance_histogram"]) == as_vllm["num_spec_steps"] > 0
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [0.0] * 11
    assert choice.logprobs.tokens == [text(n, n) for n in range(11, 22)]
    assert [choice.text[offset:] for offset in choice.logprobs.text_offset or ()][-1] == text(21, 21)


async def test_a_streamed_completion_by_openais_client() -> None:
    # Under the adaptive policy, a busy machine might leave a round to the target alone.
    async with (
        http_cluster(FakeTarget(), FakeDraft(), speculation_policy="fixed") as cluster,
        openai(cluster) as client,
    ):
        stream = await client.completions.create(
            model="fake",
            prompt=[10],
            max_tokens=11,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "num_speculative_tokens": 4},
        )
        pieces = [piece async for piece in stream]
    *chunks, last = pieces
    assert "".join(piece.choices[0].text for piece in chunks) == text(11, 21)
    assert [piece.choices[0].finish_reason for piece in chunks] == [None, None, "length"]
    extras = [piece.choices[0].model_extra or {} for piece in chunks]
    assert [extra["drafted"] for extra in extras] == [[False], *[[True] * 4 + [False]] * 2]
    assert [extra["proposed"] for extra in extras] == [[0], [4], [4]]
    assert [extra["drafted_ahead"] for extra in extras] == [[False], [False], [False]]
    assert [sum(extra["text_lengths"]) for extra in extras] == [
        len(piece.choices[0].text) for piece in chunks
    ]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 12


async def test_nothing_is_drafted_beyond_the_drafts_own_length() -> None:
    body = {
        "prompt": [10],
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        "num_speculative_tokens": 4,
    }
    options: dict[str, Any] = {"speculation_policy": "fixed", "draft_max_length": 9}
    async with http_cluster(FakeTarget(), FakeDraft(), **options) as cluster:
        answer = (await cluster.http.post("/v1/completions", json=body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == text(11, 22)
    # One token to read the prompt by, a whole proposal, one that is cut to the ninth token, and none.
    assert choice["proposed"] == [0, 4, 2, *[0] * 3]
    assert "draft_max_length" in answer["speculation"]["state"]["reason"]


async def test_chats_by_openais_client(template: Path) -> None:
    async with (
        http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster,
        openai(cluster) as client,
    ):
        request: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 5,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 1,
        }
        answer = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        pieces = [piece async for piece in stream]
    first = TOKENIZER.encode("user: a\n").ids[-1] + 1
    (choice,) = answer.choices
    assert choice.message.content == text(first, first + 4)
    assert choice.message.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    assert pieces[-1].choices[0].finish_reason == "length"
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or ()] == [0.0] * 5
    assert [entry.top_logprobs[0].token for entry in choice.logprobs.content or ()] == [
        entry.token for entry in choice.logprobs.content or ()
    ]


class Chatting(FakeTarget):
    """A target with a chat template among its files."""

    async def GetTokenizer(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        async for file in super().GetTokenizer(request, context):
            yield file
        for part in (TEMPLATE[:9], TEMPLATE[9:]):
            yield target_pb2.GetTokenizerResponse(file_name="chat_template.jinja", content=part.encode())


async def test_chats_use_the_models_own_template() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    async with http_cluster(Chatting()) as cluster:
        answer = await cluster.http.post("/v1/chat/completions", json=body)
        refused = await cluster.http.post(
            "/v1/chat/completions", json=body | {"tools": [{"type": "function"}]}
        )
        status = (await cluster.http.get("/tandem/status")).json()
        assert (status["chat"], status["instruct"]) == (True, False)
    assert answer.json()["usage"]["prompt_tokens"] == len(TOKENIZER.encode("user: a\n").ids)
    assert "tools.0 must be" in refused.json()["error"]["message"]


async def test_several_completions_of_several_prompts() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster, openai(cluster) as client:
        answer = await client.completions.create(model="fake", prompt=[[10], [30, 31]], n=2, max_tokens=3)
        stream = await client.completions.create(
            model="fake", prompt=[[10], [30, 31]], n=2, max_tokens=3, stream=True
        )
        texts = [""] * 4
        async for piece in stream:
            texts[piece.choices[0].index] += piece.choices[0].text
    assert [choice.text for choice in answer.choices] == [*[text(11, 13)] * 2, *[text(32, 34)] * 2]
    assert texts == [choice.text for choice in answer.choices]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_disconnecting_client_ends_the_targets_sequence(streams: bool) -> None:
    target = paced(0.05)
    draft = FakeDraft()
    async with http_cluster(target, draft) as cluster:
        body = {"prompt": [10], "max_tokens": 50, "stream": streams, "num_speculative_tokens": 1}
        async with asyncio.timeout(SECONDS):
            task = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
            await until(lambda: target.longest > 12)
            assert target.running == 1
            task.cancel()
            await until(lambda: not target.running and not draft.running)
    assert target.finished == 0, "the sequence was finished, not dropped"
    assert target.longest < MAX_LENGTH - 1


async def test_a_draining_server_refuses_with_a_reason_and_finishes_running_requests() -> None:
    target = paced(0.05)
    async with http_cluster(target) as cluster:
        body: dict[str, Any] = {"prompt": [10], "max_tokens": 10}
        running = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        await until(lambda: target.running == 1)
        assert len(cluster.calls) == 1
        cluster.calls.closed_because = "the coordinator service is draining"
        assert await post(cluster, **body) == (
            503,
            {
                "message": "the coordinator service is draining",
                "type": "server_error",
                "param": None,
                "code": "service_unavailable",
            },
        )
        health = await cluster.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the coordinator service is draining")
        assert (await running).status_code == 200
        assert len(cluster.calls) == 0


async def test_requests_that_outlast_the_drain_end_with_an_error() -> None:
    target = paced(0.1)
    async with http_cluster(target) as cluster, openai(cluster) as client:
        stream = await client.completions.create(model="fake", prompt=[10], max_tokens=50, stream=True)
        pieces = aiter(stream)
        await anext(pieces)
        cluster.calls.cut_off(ServiceUnavailableError("it has drained for as long as it may"))
        with pytest.raises(APIError, match="it has drained for as long as it may"):
            async for _ in pieces:
                pass
        await until(lambda: not target.running)


async def test_a_request_whose_body_has_not_come_is_refused_when_the_server_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_cluster(FakeTarget()) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        http = cluster.service.http
        assert http is not None
        await until(lambda: bool(http._server.server_state.tasks))
        await http.close()
        answer = (await reader.read()).decode()
        writer.close()
    assert answer.startswith("HTTP/1.1 503 ")
    assert "the coordinator is shutting down; send the request again" in answer
    assert not [record for record in caplog.records if record.exc_info]


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
        await _refused(client, previous_response_id="resp_1")
        for field, value in {
            "conversation": "conv_1",
            "prompt": {"id": "pmpt_1"},
            "previous_input_messages": [{"role": "user", "content": "hi"}],
            "context_management": [{"type": "compaction"}],
        }.items():
            await _refused(client, extra_body={field: value}, field=field)
        await _refused(client, max_output_tokens=0)
        await _refused(client, max_output_tokens=64, stream=True)
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


async def _refused(client: AsyncOpenAI, field: str = "", **options: Any) -> None:
    with pytest.raises(BadRequestError, match=f"- {field or next(iter(options))} is "):
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
        for name in ("max_tokens", "max_completion_tokens"):
            late = (await cluster.http.post("/v1/completions", json=body | {name: 64})).json()
            assert late["error"]["message"].startswith(f"{name} is 64; it must be at most 63")


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


async def test_with_draft_penalties_a_draft_proposes() -> None:
    body: dict[str, Any] = {"prompt": [10], "temperature": 0, "max_tokens": 9, "presence_penalty": 0.5}
    async with http_cluster(FakeTarget(), FakeDraft(), draft_model_penalties="draft") as cluster:
        said = await cluster.http.post("/v1/completions", json=body)
        assert "x-tandem-target-alone" not in said.headers
        answer = said.json()
        assert answer["choices"][0]["text"] == text(11, 19)
        assert answer["speculation"]["drafted"] > 0
        assert answer["sampling"]["presence_penalty"] == 0.5


async def test_echo_is_served_with_drafts_but_not_as_max() -> None:
    body = {"prompt": [10], "temperature": 0, "max_tokens": 9, "echo": True}
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        said = await cluster.http.post("/v1/completions", json=body)
        assert "x-tandem-target-alone" not in said.headers
        answer = said.json()
        assert answer["choices"][0]["text"] == text(10, 19)
        assert answer["speculation"]["accepted"] > 0
    async with http_cluster(FakeTarget(), FakeDraft(), compatibility="max") as cluster:
        said = await cluster.http.post("/v1/completions", json=body)
        assert said.status_code == 400
        assert said.json()["error"]["message"].startswith("echo is true and a draft proposes")
        short = await cluster.http.post("/v1/completions", json=body | {"max_tokens": 1})
        assert short.json()["choices"][0]["text"] == text(10, 11)


def with_defaults(**defaults: Any) -> FakeTarget:
    target = FakeTarget()
    target.model_info = replace(target.model_info, sampling_defaults=SamplingDefaults(**defaults))
    return target


PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


async def test_the_models_own_sampling_defaults_hold_and_are_shown(template: Path) -> None:
    target = with_defaults(temperature=0.6, top_k=20, max_new_tokens=5)
    body = {"prompt": [10], "max_tokens": 9}
    async with http_cluster(target, chat_template=template) as cluster:
        (model,) = (await cluster.http.get("/v1/models")).json()["data"]
        assert (model["root"], model["parent"], model["permission"]) == ("fake", None, [])
        assert model["sampling_defaults"] == {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": None,
            "min_p": None,
            "repetition_penalty": None,
            "max_new_tokens": 5,
        }
        status = (await cluster.http.get("/tandem/status")).json()
        assert status["sampling_defaults"] == model["sampling_defaults"]
        answer = (await cluster.http.post("/v1/completions", json=body)).json()
        assert answer["sampling"] == PLAIN_SAMPLING | {"temperature": 0.6, "top_k": 20}
        assert answer["usage"]["completion_tokens"] == 5
        named = body | {"temperature": 1.0, "top_k": -1}
        answer = (await cluster.http.post("/v1/completions", json=named)).json()
        assert answer["sampling"] == PLAIN_SAMPLING
        response = (await cluster.http.post("/v1/responses", json={"input": "hello"})).json()
        assert (response["temperature"], response["top_p"]) == (0.6, 1.0)
    override = '{"temperature": null, "top_p": 0.5, "max_new_tokens": null}'
    async with http_cluster(target, override_generation_config=override) as cluster:
        answer = (await cluster.http.post("/v1/completions", json=body)).json()
        assert answer["sampling"] == PLAIN_SAMPLING | {"top_k": 20, "top_p": 0.5}
        assert answer["usage"]["completion_tokens"] == 9
    async with http_cluster(target, generation_config="vllm") as cluster:
        answer = (await cluster.http.post("/v1/completions", json=body)).json()
        assert answer["sampling"] == PLAIN_SAMPLING


@pytest.mark.parametrize("temperature", [1e-5, 1e-8])
async def test_a_temperature_that_is_too_low_is_greedy_and_the_answer_says_so(temperature: float) -> None:
    body = {"prompt": [10], "max_tokens": 4, "temperature": temperature}
    async with http_cluster(FakeTarget()) as cluster:
        answer = (await cluster.http.post("/v1/completions", json=body)).json()
        assert answer["sampling"]["temperature"] == 0.0
        assert answer["choices"][0]["text"] == text(11, 14)
        events = (
            await cluster.http.post(
                "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
        ).text
        assert '"sampling":{"temperature":0.0,' in events


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


TOKEN = "a-token-of-many-characters"


async def test_refusals_have_openais_form() -> None:
    async with http_cluster(FakeTarget(), FakeDraft(), strict_requests=True) as cluster:
        status, error = await post(cluster, prompt="x", top_p=2)
        assert status == 400
        assert error == {
            "message": "top_p is 2.0; it must be more than 0 and at most 1",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": None,
        }
        status, error = await post(cluster)
        assert (status, "prompt is missing" in error["message"]) == (400, True)
        status, error = await post(
            cluster, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]
        )
        assert (status, "has no chat template" in error["message"]) == (400, True)
        status, error = await post(cluster, prompt="x", model="other")
        assert (status, error["code"]) == (404, "model_not_found")


async def test_invalid_http_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_SECONDS", 0.2)
    async with http_cluster(FakeTarget(), http_max_body_bytes=2000) as cluster:
        http = cluster.http

        def shown(answer: Any) -> tuple[int, Any]:
            return answer.status_code, answer.json()["error"]["message"]

        assert shown(await http.get("/v2")) == (404, "there is nothing at /v2")
        answer = await http.get("/v1/completions")
        assert shown(answer) == (405, "method is GET; /v1/completions takes POST")
        assert answer.headers["allow"] == "POST"
        plain = await http.post("/v1/completions", content=b'{"prompt": "x"}')
        assert shown(plain) == (415, "content-type is not set; it must be application/json")
        large = await http.post("/v1/completions", json={"prompt": "x" * 3000})
        assert shown(large) == (413, "the body is larger than 2000 bytes, which is the most")
        broken = await http.post(
            "/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
        assert shown(broken)[0] == 400
        assert "the body cannot be read: invalid JSON" in shown(broken)[1]

        async def slow() -> Any:
            yield b"{"
            await asyncio.sleep(1)
            yield b"}"

        late = await http.post(
            "/v1/completions", content=slow(), headers={"content-type": "application/json"}
        )
        assert shown(late) == (408, "the body did not come within 0.2 s")


async def test_too_many_requests_get_a_retry_after_header() -> None:
    target = paced(0.2)
    bounds: dict[str, Any] = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    async with http_cluster(target, **bounds) as cluster, openai(cluster) as client:
        running = asyncio.create_task(client.completions.create(model="fake", prompt=[10], max_tokens=20))
        await until(lambda: target.running == 1)
        with pytest.raises(RateLimitError) as refusal:
            await client.completions.create(model="fake", prompt=[10], stream=True)
        running.cancel()
        assert float(refusal.value.response.headers["retry-after"]) >= 1
        assert float(refusal.value.response.headers["retry-after-ms"]) >= 100
        # With retries on, the client tries again by itself.
        async with openai(cluster, max_retries=5) as patient:
            answer = await patient.completions.create(model="fake", prompt=[10], max_tokens=1)
        assert answer.choices[0].text == text(11, 11)


async def test_a_request_ends_at_its_deadline() -> None:
    target = paced(0.3)
    async with http_cluster(target) as cluster, openai(cluster) as client:
        with pytest.raises(APIStatusError) as late:
            await client.completions.create(model="fake", prompt=[10], extra_body={"timeout_seconds": 0.5})
        assert late.value.status_code == 504
        stream = await client.completions.create(
            model="fake", prompt=[10], stream=True, extra_body={"timeout_seconds": 0.5}
        )
        with pytest.raises(APIError, match=r"longer than the 0\.5 s .* 1 token was delivered"):
            async for _ in stream:
                pass


async def test_tokens() -> None:
    async with http_cluster(FakeTarget(), auth_token=TOKEN) as cluster:
        for path in ("/v1/models", "/metrics", "/tandem/status", "/version", "/nothing"):
            answer = await cluster.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/health", "/", "/page.css", "/page.js"):
            assert (await cluster.http.get(path)).status_code == 200
        async with openai(cluster, api_key=TOKEN) as client:
            assert (await client.models.list()).data[0].id == "fake"
        async with openai(cluster, api_key="another-token-of-many") as client:
            with pytest.raises(APIStatusError) as refusal:
                await client.models.list()
            assert refusal.value.status_code == 401


async def test_dns_rebinding_is_refused() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        taken = ("localhost:1", "LOCALHOST", "[::1]")
        refused = ("evil.example", "evil.example:80", "[", "x@127.0.0.1", "127.0.0.1#.x", "127.0.0.1?x",
                   "127.0.0.1/", "[::1]x", "127.0.0.1:80:1")  # fmt: skip
        hosts = dict.fromkeys(refused, 403) | dict.fromkeys(taken, 200)
        for host, status in hosts.items():
            assert (await cluster.http.get("/v1/models", headers={"host": host})).status_code == status
    async with http_cluster(FakeTarget(), auth_token=TOKEN) as cluster:
        headers = {"host": "tandem.example", "authorization": f"Bearer {TOKEN}"}
        assert (await cluster.http.get("/v1/models", headers=headers)).status_code == 200


async def test_a_port_in_use_is_reported_at_once() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        port = int(cluster.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--http-port"):
            async with http_cluster(FakeTarget(), http_port=port):
                pass


async def serial(url: str, ca: Path) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(ca))
    async with httpx2.AsyncClient(verify=context) as client, client.stream("GET", f"{url}/health") as answer:
        assert answer.status_code == 200
        shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return int(shown["serialNumber"], 16)


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = issued(tmp_path, authority)
    async with http_cluster(FakeTarget(), tls_cert_file=files.cert, tls_key_file=files.key) as cluster:
        assert cluster.url.startswith("https://127.0.0.1:")
        before = await serial(cluster.url, files.ca)
        assert await serial(cluster.url, files.ca) == before
        issued(tmp_path, authority)
        later = time.time() + 5
        for path in (files.cert, files.key):
            os.utime(path, (later, later))
        assert await serial(cluster.url, files.ca) != before
