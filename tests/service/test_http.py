"""The HTTP server over fake services: every path, every refusal, and disconnecting clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError

from tandem.v1 import target_pb2
from tests.service.clients import until
from tests.service.fakes import MAX_LENGTH, FakeDraft, FakeTarget
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
    target, draft = FakeTarget(), FakeDraft()
    target.step_seconds = 0.05
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
    target = FakeTarget()
    target.step_seconds = 0.05
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
    target = FakeTarget()
    target.step_seconds = 0.1
    async with http_cluster(target) as cluster, openai(cluster) as client:
        stream = await client.completions.create(model="fake", prompt=[10], max_tokens=50, stream=True)
        pieces = aiter(stream)
        await anext(pieces)
        cluster.calls.cut_off("it has drained for as long as it may")
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
        http = cluster.service._http
        assert http is not None
        await until(lambda: bool(http._server.server_state.tasks))
        await http.close()
        answer = (await reader.read()).decode()
        writer.close()
    assert answer.startswith("HTTP/1.1 503 ")
    assert "the coordinator is shutting down; send the request again" in answer
    assert not [record for record in caplog.records if record.exc_info]
