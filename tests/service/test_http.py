"""The HTTP side over services that count: every path, every refusal, and what becomes of a client that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, RateLimitError
from tokenizers import Tokenizer

from coordinator.http import body as body_module
from coordinator.settings import CoordinatorSettings
from tandem.errors import ConfigurationError
from tandem.v1 import target_pb2
from tests.paths import DEMO_TARGET
from tests.service.clients import until
from tests.service.fakes import MAX_LENGTH, FakeDraft, FakeTarget
from tests.service.http_cluster import HttpCluster, http_cluster

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SECONDS = 20.0
TOKEN = "a-token-of-many-characters"


def text(first: int, last: int) -> str:
    decoded: str = TOKENIZER.decode(list(range(first, last + 1)))
    return decoded


def openai(cluster: HttpCluster, **changes: Any) -> AsyncOpenAI:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": SECONDS} | changes
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", **options)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


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
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster, openai(cluster) as client:
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
    *told, last = pieces
    assert "".join(piece.choices[0].text for piece in told) == text(11, 21)
    assert [piece.choices[0].finish_reason for piece in told] == [None, None, "length"]
    extras = [piece.choices[0].model_extra or {} for piece in told]
    assert [extra["drafted"] for extra in extras] == [[False], *[[True] * 4 + [False]] * 2]
    assert [extra["proposed"] for extra in extras] == [[0], [4], [4]]
    assert [sum(extra["text_lengths"]) for extra in extras] == [len(piece.choices[0].text) for piece in told]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 12


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
    """Has a chat template among its files."""

    async def GetTokenizer(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        async for file in super().GetTokenizer(request, context):
            yield file
        for part in (TEMPLATE[:9], TEMPLATE[9:]):
            yield target_pb2.GetTokenizerResponse(file_name="chat_template.jinja", content=part.encode())


async def test_the_chat_template_is_the_models_own() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    async with http_cluster(Chatting()) as cluster:
        answer = await cluster.http.post("/v1/chat/completions", json=body)
        refused = await cluster.http.post(
            "/v1/chat/completions", json=body | {"tools": [{"type": "function"}]}
        )
        assert (await cluster.http.get("/tandem/status")).json()["chat"]
    assert answer.json()["usage"]["prompt_tokens"] == len(TOKENIZER.encode("user: a\n").ids)
    assert "tools is set; it must be empty" in refused.json()["error"]["message"]


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
async def test_a_client_that_goes_ends_the_targets_sequence(streams: bool) -> None:
    target, draft = FakeTarget(), FakeDraft()
    target.step_seconds = 0.05
    async with http_cluster(target, draft) as cluster:
        body = {"prompt": [10], "max_tokens": 50, "stream": streams, "num_speculative_tokens": 1}
        async with asyncio.timeout(SECONDS):
            task = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
            await until(lambda: target.longest > 12, SECONDS)
            assert target.running == 1
            task.cancel()
            await until(lambda: not target.running and not draft.running, SECONDS)
    assert target.finished == 0, "it was dropped, not finished"
    assert target.longest < MAX_LENGTH - 1


async def test_leaving_the_loop_ends_the_targets_sequence() -> None:
    target = FakeTarget()
    target.step_seconds = 0.05
    async with http_cluster(target) as cluster, openai(cluster) as client:
        stream = await client.completions.create(model="fake", prompt=[10], max_tokens=50, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: not target.running, SECONDS)
    assert target.longest < 20


async def post(
    cluster: HttpCluster, path: str = "/v1/completions", **body: Any
) -> tuple[int, dict[str, Any]]:
    answer = await cluster.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]


async def test_refusals_have_openais_form() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        status, error = await post(cluster, prompt="x", top_p=2)
        assert status == 400
        assert error == {
            "message": "top_p is 2.0; it must be more than 0 and at most 1",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": None,
        }
        for body, sentence in (
            ({"prompt": "x", "echo": True}, "echo is true"),
            (
                {"prompt": "x", "presence_penalty": 0.5},
                "presence_penalty is 0.5; with a separate draft model",
            ),
            ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format is json_schema"),
            ({"prompt": "x", "foo": 1}, "foo is not an option of this request"),
            ({"prompt": "x", "max_tokens": "5"}, "max_tokens is '5': input should be a valid integer"),
            ({"prompt": "x", "seed": 2**80}, f"seed is {2**80}; it must be a signed 64-bit integer"),
            ({"prompt": "x", "stop": ["a", ""]}, "a stop string is empty"),
            ({"prompt": 5}, "prompt is 5"),
            ({"prompt": [5000]}, "the prompt holds token id 5000"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": "x", "timeout_seconds": 0}, "timeout_seconds is 0"),
            ({"prompt": "x", "rejection_sampling_strategy": "luck"}, "luck"),
            ({}, "prompt is missing"),
        ):
            status, error = await post(cluster, **body)
            assert status == 400
            assert sentence in error["message"]
            assert error["type"] == "invalid_request_error"
        status, error = await post(
            cluster, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]
        )
        assert (status, "has no chat template" in error["message"]) == (400, True)
        status, error = await post(cluster, prompt="x", model="other")
        assert (status, error["code"]) == (404, "model_not_found")


async def test_what_http_itself_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.2)
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


async def test_too_many_requests_are_told_when_to_come_back() -> None:
    target = FakeTarget()
    target.step_seconds = 0.2
    bounds: dict[str, Any] = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    async with http_cluster(target, **bounds) as cluster, openai(cluster) as client:
        running = asyncio.create_task(client.completions.create(model="fake", prompt=[10], max_tokens=20))
        await until(lambda: target.running == 1, SECONDS)
        with pytest.raises(RateLimitError) as refusal:
            await client.completions.create(model="fake", prompt=[10], stream=True)
        running.cancel()
        assert float(refusal.value.response.headers["retry-after"]) >= 1
        assert float(refusal.value.response.headers["retry-after-ms"]) >= 100
        # With its retries on, the client comes back by itself.
        async with openai(cluster, max_retries=5) as patient:
            answer = await patient.completions.create(model="fake", prompt=[10], max_tokens=1)
        assert answer.choices[0].text == text(11, 11)


async def test_a_deadline_is_kept() -> None:
    target = FakeTarget()
    target.step_seconds = 0.3
    async with http_cluster(target) as cluster, openai(cluster) as client:
        with pytest.raises(APIStatusError) as late:
            await client.completions.create(model="fake", prompt=[10], extra_body={"timeout_seconds": 0.5})
        assert late.value.status_code == 504
        stream = await client.completions.create(
            model="fake", prompt=[10], stream=True, extra_body={"timeout_seconds": 0.5}
        )
        with pytest.raises(
            APIError, match=r"took longer than the 0\.5 s it was given; 1 tokens were delivered"
        ):
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


async def test_a_page_that_calls_itself_this_machine_reads_nothing() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        hosts = {"evil.example": 403, "evil.example:80": 403, "[": 403, "localhost:1": 200, "[::1]": 200}
        for host, status in hosts.items():
            assert (await cluster.http.get("/v1/models", headers={"host": host})).status_code == status
    async with http_cluster(FakeTarget(), auth_token=TOKEN) as cluster:
        headers = {"host": "tandem.example", "authorization": f"Bearer {TOKEN}"}
        assert (await cluster.http.get("/v1/models", headers=headers)).status_code == 200


async def test_what_is_closed_says_why_and_what_runs_goes_on() -> None:
    target = FakeTarget()
    target.step_seconds = 0.05
    async with http_cluster(target) as cluster:
        body: dict[str, Any] = {"prompt": [10], "max_tokens": 10}
        running = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        await until(lambda: target.running == 1, SECONDS)
        assert len(cluster.calls) == 1
        cluster.gate.closed_because = "the coordinator service is draining"
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


async def test_what_drains_for_too_long_is_cut_off_with_a_word() -> None:
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
        await until(lambda: not target.running, SECONDS)


async def test_status_and_version() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        await cluster.http.post("/v1/completions", json={"prompt": [10], "max_tokens": 11, "temperature": 0})
        status = (await cluster.http.get("/tandem/status")).json()
        assert {"version"} == set((await cluster.http.get("/version")).json())
    assert status["state"] == "ready"
    assert [replica["role"] for replica in status["replicas"]] == ["target", "draft"]
    assert all(replica["state"] == "ready" for replica in status["replicas"])
    assert status["speculation"]["accepted"] > 0
    assert status["load"] == {"running": 0, "queued": 0}


async def test_metrics_are_those_of_the_coordinator() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        await cluster.http.post("/v1/completions", json={"prompt": [10], "max_tokens": 11, "temperature": 0})
        answer = await cluster.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert samples['tandem_spec_decode_num_accepted_tokens_total{model_name="fake",rule="greedy"}'] == "6.0"


async def test_a_port_that_is_taken_is_told_at_once() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        port = int(cluster.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--http-port"):
            async with http_cluster(FakeTarget(), http_port=port):
                pass


def test_other_machines_are_not_served_unprotected() -> None:
    with pytest.raises(ValueError, match=r"http_host is 0\.0\.0\.0, which other machines reach"):
        CoordinatorSettings(target_address="127.0.0.1:1", http_port=0, http_host="0.0.0.0")
    CoordinatorSettings(target_address="127.0.0.1:1", http_host="0.0.0.0")
