"""Refusals over HTTP, their status codes, and TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
from openai import APIError, APIStatusError, RateLimitError

from coordinator.http import bodies as reading
from tandem.errors import ConfigurationError
from tests.certificates import issued
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import http_cluster, openai, post, text

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
        for body, sentence in (
            ({"prompt": "x", "foo": 1}, "foo is not an option of this request"),
            ({"prompt": [5000]}, "the prompt holds token id 5000"),
            ({}, "prompt is missing"),
        ):
            status, error = await post(cluster, **body)
            assert (status, sentence in error["message"]) == (400, True)
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
    target = FakeTarget()
    target.step_seconds = 0.2
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
    target = FakeTarget()
    target.step_seconds = 0.3
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
