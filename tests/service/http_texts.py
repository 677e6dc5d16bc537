"""Parts that several tests of HTTP share."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from tokenizers import Tokenizer

from tests.paths import DEMO_TARGET
from tests.service.http_cluster import HttpCluster

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SECONDS = 20.0


def text(first: int, last: int) -> str:
    decoded: str = TOKENIZER.decode(list(range(first, last + 1)))
    return decoded


def openai(cluster: HttpCluster, **changes: Any) -> AsyncOpenAI:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": SECONDS} | changes
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", **options)


async def post(
    cluster: HttpCluster, path: str = "/v1/completions", **body: Any
) -> tuple[int, dict[str, Any]]:
    answer = await cluster.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]
