"""A third-party client: LangChain itself, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

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
