"""Third-party clients: LangChain itself, in a process of its own, and requests as LiteLLM and lm-eval send them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import TOKENIZER, HttpCluster, http_cluster, text

pytestmark = pytest.mark.slow

SECONDS = 240.0

LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI, OpenAI
options = dict(base_url=sys.argv[1] + "/v1", api_key="none", model="fake", temperature=0, max_tokens=5)
chat = ChatOpenAI(**options)
plain = OpenAI(**options)
print(json.dumps({
    "chat": chat.invoke("a").content,
    "chat_stream": "".join(piece.content for piece in chat.stream("a")),
    "plain": plain.invoke("def f():"),
    "plain_stream": "".join(plain.stream("def f():")),
}))
"""

LITELLM_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 5,
        "temperature": 0,
    },
    "/v1/completions": {"model": "fake", "prompt": "def f():", "max_tokens": 5, "temperature": 0},
}
"""As LiteLLM 1.83.0 sends them."""

LM_EVAL_REQUEST: dict[str, Any] = {
    "prompt": "def f():",
    "model": "fake",
    "max_tokens": 5,
    "temperature": 0.0,
    "stop": ["zzz"],
    "seed": 1234,
}
"""As `local-completions` of lm-eval 0.4.13 sends it."""


async def answers(script: str, cluster: HttpCluster) -> dict[str, str]:
    """Run a client's script against this coordinator without any other network, and return its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", script, cluster.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"LANGSMITH_TRACING": "false"},
    )  # fmt: skip
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    printed: dict[str, str] = json.loads(out.decode().strip().splitlines()[-1])
    return printed


def after(prompt: str) -> str:
    """The counting target's text of five tokens."""
    last = TOKENIZER.encode(prompt).ids[-1]
    return text(last + 1, last + 5)


async def test_langchain_completes(template: Path) -> None:
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        printed = await answers(LANGCHAIN, cluster)
    assert printed["chat"] == printed["chat_stream"] == after("user: a\n")
    assert printed["plain"] == printed["plain_stream"] == after("def f():")


async def test_the_requests_of_litellm(template: Path) -> None:
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        chat, plain = [
            (await cluster.http.post(path, json=body)).json()["choices"][0]
            for path, body in LITELLM_REQUESTS.items()
        ]
    assert chat["message"]["content"] == after("user: a\n")
    assert plain["text"] == after("def f():")


async def test_the_request_of_lm_eval() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        answer = await cluster.http.post("/v1/completions", json=LM_EVAL_REQUEST)
        refused = await cluster.http.post(
            "/v1/completions", json=LM_EVAL_REQUEST | {"echo": True, "logprobs": 1}
        )
    assert answer.json()["choices"][0]["text"] == after("def f():")
    assert refused.json()["error"]["message"].startswith(
        "echo is true and a draft proposes; it must be false"
    )
