"""Whatever a client names, asks for or sends at once, it gets an answer, and one that says what was wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.service.clients import until
from tests.service.fakes import HANG_SECONDS, FakeTarget, paced
from tests.service.http_cluster import http_cluster, post

SAID = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("names", "shown"),
    [(("a", ""), 'a, ""'), (("",), '""'), ((" ",), "?"), (("a\n", "b "), "a?, b?"), (("é", "\t"), "?, ?")],
)
async def test_any_name_of_a_field_can_be_reported(names: tuple[str, ...], shown: str) -> None:
    body = {"prompt": "a", "max_tokens": 1} | dict.fromkeys(names, 1)
    async with http_cluster(FakeTarget()) as cluster:
        for stream in (False, True):
            answer = await cluster.http.post("/v1/completions", json=body | {"stream": stream})
            assert answer.status_code == 200
            assert answer.headers["x-tandem-ignored"] == shown


async def test_a_name_of_a_request_that_is_cut_at_a_space_is_repeated() -> None:
    """A header's value must not end with a space, and 256 bytes of a longer one may."""
    named = "n" * 250 + " " * 10 + "end"
    async with http_cluster(FakeTarget()) as cluster:
        answer = await cluster.http.get("/health", headers={"x-request-id": named})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "n" * 250)


@pytest.mark.parametrize(
    ("path", "changes", "param", "sentence"),
    [
        ("completions", {"prompt": [999999]}, "prompt",
            "the prompt holds token id 999999, out of vocabulary; ids must be in 0..2047"),
        ("completions", {"prompt": [7, -1, 5000, 5000]}, "prompt",
            "the prompt holds token ids -1, 5000, out of vocabulary; ids must be in 0..2047"),
        ("completions", {"prompt": []}, "prompt", "the prompt is empty; it must hold at least one token"),
        ("completions", {"prompt": None}, "prompt",
            "prompt is null; it must be a string, a list of strings, a list of integers or a list of lists of "
            "integers"),
        ("completions", {"prompt": [1, "x"]}, "prompt.1", 'prompt.1 is "x": input should be a valid integer'),
        ("completions", {"stop": [""]}, "stop", "stop holds an empty string; each must have a character"),
        ("completions", {"logit_bias": {"5000": 1, "6000": 1, "7": 1}}, "logit_bias",
            "logit_bias is for token ids 5000, 6000, out of vocabulary; ids must be in 0..2047"),
        ("completions", {"logit_bias": {"5": 101, "6": -200.5, "7": 1}}, "logit_bias",
            "logit_bias is 101.0 for token id 5, -200.5 for token id 6; it must be between -100 and 100"),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 100}]}, "messages", None),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content",
            "messages.0.content is 5; it must be a string or a list of objects"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field_and_all_that_is_wrong_with_it(
    path: str, changes: dict[str, Any], param: str, sentence: str | None, template: Path
) -> None:
    body = (SAID if path.startswith("chat") else {"prompt": "a"}) | changes
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        status, error = await post(cluster, f"/v1/{path}", **body)
    assert (status, error["param"]) == (400, param)
    assert sentence is None or error["message"] == sentence


async def test_each_wrong_key_of_a_map_is_named() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        status, error = await post(cluster, prompt="a", logit_bias={"one": 1, "two": 2, "3": "x"})
    assert status == 400
    for name in ("logit_bias.one", "logit_bias.two", "logit_bias.3"):
        assert f"{name} is" in error["message"]


async def test_a_burst_of_chats_waits_in_the_queue(template: Path) -> None:
    bounds: dict[str, Any] = {"max_concurrent_requests": 8, "max_queued_requests": 256}
    async with http_cluster(FakeTarget(), chat_template=template, **bounds) as cluster:
        answers = await asyncio.gather(
            *(cluster.http.post("/v1/chat/completions", json=SAID) for _ in range(90))
        )
    assert Counter(answer.status_code for answer in answers) == {200: 90}


async def test_a_burst_is_refused_by_the_queue_alone(template: Path) -> None:
    """Chats whose prompts are being made wait in the queue too."""
    target = paced(30.0)
    # All come from one address, whose bound counts answers that are on their way too
    bounds: dict[str, Any] = {
        "max_concurrent_requests": 8,
        "max_queued_requests": 12,
        "max_streams_per_peer": 100,
    }
    async with http_cluster(target, chat_template=template, **bounds) as cluster:
        # Its process makes prompts, and on a busy machine starts for longer than a client waits
        await cluster.http.post("/tokenize", json={"messages": SAID["messages"]}, timeout=HANG_SECONDS)
        paths = [("/v1/chat/completions", SAID), ("/v1/completions", {"prompt": "a", "max_tokens": 1})]
        tasks = [
            asyncio.create_task(cluster.http.post(path, json=body))
            for _ in range(30)
            for path, body in (*paths, ("/tokenize", {"messages": SAID["messages"]}))
        ]
        admission = cluster.service.completions.admission
        most = 20 + admission.max_running // 8
        # A call of /tokenize waits in the queue too, so that fewer of the others may have found a place there
        await until(lambda: sum(task.done() for task in tasks) >= len(tasks) - most)
        refused = [task.result() for task in tasks if task.done() and task.result().status_code == 429]
        assert refused
        for answer in refused:
            message = answer.json()["error"]["message"]
            assert message.endswith("wait, which is the most; try again later"), message
        assert 0 < admission.running + admission.queued <= most
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_completions_own_token_is_among_the_likely_ones() -> None:
    """OpenAI names up to one token more than asked for."""
    body = {"prompt": [10], "max_tokens": 3, "temperature": 1.5, "seed": 3}
    async with http_cluster(FakeTarget()) as cluster:
        for count in (0, 1, 5):
            answer = await cluster.http.post("/v1/completions", json=body | {"logprobs": count})
            logprobs = answer.json()["choices"][0]["logprobs"]
            for token, logprob, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            ):
                assert top[token] == logprob
                assert count <= len(top) <= count + 1
