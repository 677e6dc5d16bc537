"""OpenAI's own client, unchanged, against real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from tandem.sync_client import SyncClient
from tests.end_to_end.processes import Process, address_of, coordinator
from tests.paths import DEMO_TARGET

pytestmark = pytest.mark.slow

PROMPT = "def area(width, height):\n"
SECONDS = 60.0
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def process(
    target_address: str, draft_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = ("--http-port", "0", "--chat-template", str(template))
    with coordinator(target_address, draft_address, *options) as process:
        address_of(process)
        yield process


@pytest.fixture(scope="module")
def url(process: Process) -> str:
    return process.line("http on ")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=SECONDS) as client:
        yield client


def test_every_endpoint_returns_the_same_text(client: OpenAI, process: Process) -> None:
    with SyncClient(address_of(process)) as grpc_client:
        expected = grpc_client.complete(PROMPT, max_tokens=24, temperature=0.0)
    asked: Any = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    pieces = client.completions.create(**asked, stream=True)
    alone = client.completions.create(**asked, extra_body={"speculation": False})
    del asked["prompt"]
    asked["messages"] = [{"role": "user", "content": PROMPT}]
    chat_pieces: Any = client.chat.completions.create(**asked, stream=True)
    asked["max_completion_tokens"] = asked.pop("max_tokens")
    chat = client.chat.completions.create(**asked)
    assert whole.choices[0].text == expected.text
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    assert chat.choices[0].message.content == expected.text
    assert "".join(piece.choices[0].delta.content or "" for piece in chat_pieces) == expected.text
    assert alone.choices[0].text == expected.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert (
        whole.usage.completion_tokens_details.accepted_prediction_tokens == expected.speculation.accepted > 0
    )


def test_log_probabilities_are_those_of_the_model(client: OpenAI) -> None:
    import torch

    from tests.end_to_end.models import load_reference

    answer = client.completions.create(
        model="target",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        logprobs=3,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.model_extra is not None
    assert choice.logprobs is not None
    token_ids = choice.model_extra["token_ids"]
    prompt = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(PROMPT).ids
    with torch.inference_mode():
        logits = load_reference(DEMO_TARGET)(torch.tensor([[*prompt, *token_ids]])).logits[0]
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)
    expected = [float(row[token_id]) for row, token_id in zip(rows, token_ids, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
