"""Third-party clients, unchanged.

LangChain (chat and plain) runs in a process of its own, and so does LiteLLM, as a soak test: where nothing of it is
compiled yet, importing it takes 20 s. The requests of LiteLLM 1.83.0 and lm-eval's `local-completions` 0.4.13 are
kept here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import HttpCluster, http_cluster
from tests.service.http_texts import TEMPLATE, TOKENIZER, text

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

LITELLM = """
import json, sys
import litellm
options = dict(api_base=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=5)
messages = [{"role": "user", "content": "a"}]
whole = litellm.completion(model="openai/fake", messages=messages, **options)
stream = litellm.completion(model="openai/fake", messages=messages, stream=True, **options)
plain = litellm.text_completion(model="text-completion-openai/fake", prompt="def f():", **options)
print(json.dumps({
    "chat": whole.choices[0].message.content,
    "chat_stream": "".join(piece.choices[0].delta.content or "" for piece in stream),
    "plain": plain.choices[0].text,
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
"""The request of that script; with `stream: true` for a stream."""

LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
client = LocalCompletionsAPI(
    base_url=sys.argv[1] + "/v1/completions", model="fake", tokenizer_backend=None, tokenized_requests=False,
    max_gen_toks=5, max_retries=1,
)
asked = Instance("generate_until", {}, ("def f():", {"until": ["zzz"], "temperature": 0.0}), 0)
print(json.dumps({"plain": client.generate_until([asked])[0]}))
"""

LM_EVAL_REQUEST: dict[str, Any] = {
    "prompt": "def f():",
    "model": "fake",
    "max_tokens": 5,
    "temperature": 0.0,
    "stop": ["zzz"],
    "seed": 1234,
}
"""The request of that script of lm-eval 0.4.13."""


async def answers(script: str, cluster: HttpCluster, python: str = sys.executable) -> dict[str, str]:
    """Run a client's script against this coordinator without any other network, and return its output."""
    process = await asyncio.create_subprocess_exec(
        python, "-W", "ignore", "-c", script, cluster.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"},
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


@pytest.mark.parametrize(
    ("package", "script"),
    [("langchain_openai", LANGCHAIN), pytest.param("litellm", LITELLM, marks=pytest.mark.soak)],
)
async def test_a_third_party_client_completes(package: str, script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        printed = await answers(script, cluster)
    assert {name: words for name, words in printed.items() if name.startswith("chat")} == {
        "chat": after("user: a\n"),
        "chat_stream": after("user: a\n"),
    }
    assert all(words == after("def f():") for name, words in printed.items() if name.startswith("plain"))


async def test_the_requests_of_litellm(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
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
        scored = await cluster.http.post(
            "/v1/completions", json=LM_EVAL_REQUEST | {"echo": True, "logprobs": 1}
        )
    assert answer.json()["choices"][0]["text"] == after("def f():")
    assert scored.json()["error"]["message"].startswith(
        "echo is true; it must be false: this coordinator does not"
    )


@pytest.mark.skipif(
    "TANDEM_TEST_LM_EVAL_PYTHON" not in os.environ,
    reason="TANDEM_TEST_LM_EVAL_PYTHON names no Python with lm-eval[api], which is too heavy for the tests' own",
)
async def test_lm_eval_itself() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        printed = await answers(LM_EVAL, cluster, os.environ["TANDEM_TEST_LM_EVAL_PYTHON"])
    assert printed["plain"] == after("def f():")
