"""vLLM's fields over HTTP: what they add to answers, in vLLM's own form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import TEMPLATE, TOKENIZER, http_cluster, post, text

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
PROMPT: dict[str, Any] = {"prompt": [10, 11], "max_tokens": 2, "temperature": 0}
SPECIAL = next(token.content for token in TOKENIZER.get_added_tokens_decoder().values() if token.special)
CHAT = tuple(TOKENIZER.encode("user: a\n").ids)


def pieces_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


async def test_the_ids_of_prompts_are_returned_with_those_of_completions(template: Path) -> None:
    body = PROMPT | {"prompt": [[10, 11], [20]], "n": 2, "return_token_ids": True}
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        whole = (await cluster.http.post("/v1/completions", json=body)).json()
        stream = await cluster.http.post("/v1/completions", json=body | {"stream": True})
        said = SAID | {"return_token_ids": True}
        chat = (await cluster.http.post("/v1/chat/completions", json=said)).json()
        chat_stream = await cluster.http.post("/v1/chat/completions", json=said | {"stream": True})
        plain = (await cluster.http.post("/v1/completions", json=PROMPT)).json()
    expected = [[10, 11], [10, 11], [20], [20]]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == expected
    assert [choice["token_ids"] for choice in whole["choices"]] == [[12, 13]] * 2 + [[21, 22]] * 2
    first: dict[int, Any] = {}
    for piece in pieces_of(stream.text):
        (choice,) = piece["choices"]
        assert ("prompt_token_ids" in choice) == (choice["index"] not in first), "once, at the beginning"
        first.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert [first[index] for index in range(4)] == expected
    assert chat["prompt_token_ids"] == list(CHAT)
    begun, *rest = pieces_of(chat_stream.text)
    assert begun["prompt_token_ids"] == list(CHAT)
    assert rest
    assert not any("prompt_token_ids" in piece for piece in rest)
    not_asked = {"prompt_token_ids": None, "token_ids": None, "prompt_logprobs": None}
    assert not_asked.items() <= plain["choices"][0].items(), "null in a whole answer, as in vLLM"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_ids_of_a_completion_are_its_own_where_the_prompt_is_echoed(stream: bool) -> None:
    body = PROMPT | {"echo": True, "logprobs": 0, "return_token_ids": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        answer = await cluster.http.post("/v1/completions", json=body)
        unasked = await cluster.http.post("/v1/completions", json=body | {"max_tokens": 0})
    pieces = pieces_of(answer.text) if stream else [answer.json()]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    listed = {
        name: [item for choice in choices for item in choice.get(name) or ()]
        for name in ("token_ids", "drafted", "text_lengths", "prompt_token_ids")
    }
    assert listed["token_ids"] == [12, 13]
    assert len(listed["drafted"]) == len(listed["text_lengths"]) == 2
    assert listed["prompt_token_ids"] == [10, 11]
    assert "".join(choice["text"] for choice in choices) == text(10, 13)
    found = [
        each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["token_logprobs"]
    ]
    assert len(found) == 4
    assert pieces[0]["usage"]["completion_tokens"] == (0 if stream else 2), (
        "the prompt is no part of the completion"
    )
    nothing = pieces_of(unasked.text)[0] if stream else unasked.json()
    assert nothing["choices"][0]["token_ids"] == []


async def test_the_texts_of_special_tokens_are_echoed() -> None:
    async with http_cluster(FakeTarget(lambda tokens: 300)) as cluster:
        body = PROMPT | {"echo": True, "max_tokens": 1}
        for prompt in (f"a{SPECIAL}b", [0, 0]):
            answer = (await cluster.http.post("/v1/completions", json=body | {"prompt": prompt})).json()
            shown = prompt if isinstance(prompt, str) else SPECIAL * 2
            assert answer["choices"][0]["text"].startswith(shown)


async def test_the_model_may_have_several_names() -> None:
    async with http_cluster(FakeTarget(), served_model_name=["one/a", "b"]) as cluster:
        models = (await cluster.http.get("/v1/models")).json()
        other = (await cluster.http.get("/v1/models/b")).json()
        answers = [
            (await cluster.http.post("/v1/completions", json=PROMPT | {"model": name})).json()
            for name in ("one/a", "b")
        ]
        status, error = await post(cluster, **(PROMPT | {"model": "c"}))
        metrics = (await cluster.http.get("/metrics")).text
    assert set(re.findall(r'model_name="([^"]*)"', metrics)) == {"one/a"}
    assert [model["id"] for model in models["data"]] == ["one/a", "b"]
    assert other["id"] == "b"
    assert [answer["model"] for answer in answers] == ["one/a"] * 2, "as in vLLM answers have the first"
    assert (status, error["message"]) == (
        404,
        "model is 'c'; it must be 'one/a' or 'b', which is served here",
    )


async def test_an_answer_has_vllms_times() -> None:
    names = {
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        two = (await cluster.http.post("/v1/completions", json=PROMPT)).json()["metrics"]
        one = (await cluster.http.post("/v1/completions", json=PROMPT | {"max_tokens": 1})).json()["metrics"]
        none = PROMPT | {"max_tokens": 0, "echo": True}
        nothing = (await cluster.http.post("/v1/completions", json=none)).json()["metrics"]
    assert names <= two.keys()
    assert all(two[name] >= 0 for name in names)
    assert names - one.keys() == {"mean_itl_ms"}
    assert names & nothing.keys() == {"queue_time_ms"}


async def test_log_probabilities_may_name_tokens_by_their_ids(template: Path) -> None:
    own = {"return_tokens_as_token_ids": True}
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        body = PROMPT | own | {"logprobs": 1}
        said = SAID | own | {"logprobs": True, "top_logprobs": 1}
        found = (await cluster.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        chat = (await cluster.http.post("/v1/chat/completions", json=said)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:12", "token_id:13"]
    assert found["top_logprobs"] == [{"token_id:12": 0.0}, {"token_id:13": 0.0}]
    first = CHAT[-1] + 1
    assert [entry["token"] for entry in chat["content"]] == [f"token_id:{first}", f"token_id:{first + 1}"]
    assert chat["content"][0]["top_logprobs"][0]["token"] == f"token_id:{first}"
    assert bytes(chat["content"][0]["bytes"]).decode() == text(first, first)


async def test_prompts_are_scored_in_vllms_form(template: Path) -> None:
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        body = PROMPT | {"prompt": [10, 11, 20], "prompt_logprobs": 1}
        (choice,) = (await cluster.http.post("/v1/completions", json=body)).json()["choices"]
        chat = (await cluster.http.post("/v1/chat/completions", json=SAID | {"prompt_logprobs": 0})).json()
        echoed = (
            await cluster.http.post("/v1/completions", json=body | {"echo": True, "logprobs": 1})
        ).json()
        ignored = await cluster.http.post(
            "/v1/completions", json=PROMPT | {"prompt_logprobs": 0, "stream": True}
        )
    nothing, known, surprise = choice["prompt_logprobs"]
    assert nothing is None
    # The fake target counts: 11 follows 10 for certain, and 12 would follow 11.
    assert known == {"11": {"logprob": 0.0, "rank": 1, "decoded_token": text(11, 11)}}
    assert list(surprise) == ["20", "12"]
    assert surprise["12"]["rank"] == 1
    assert surprise["20"]["rank"] > 1
    assert surprise["20"]["logprob"] < -5.0
    assert choice["text"] == text(21, 22)
    assert len(chat["prompt_logprobs"]) == len(CHAT)
    assert "prompt_logprobs" not in chat["choices"][0]
    assert echoed["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert ignored.headers["x-tandem-ignored"] == "prompt_logprobs"


async def test_a_prompt_is_shortened(template: Path) -> None:
    own = {"truncate_prompt_tokens": 1, "return_token_ids": True}
    async with http_cluster(FakeTarget(), FakeDraft(), chat_template=template) as cluster:
        for side, last in ((None, 11), ("left", 11), ("right", 10)):
            found = (
                await cluster.http.post("/v1/completions", json=PROMPT | own | {"truncation_side": side})
            ).json()
            assert found["choices"][0]["prompt_token_ids"] == [last]
            assert found["choices"][0]["token_ids"] == [last + 1, last + 2]
            assert found["usage"]["prompt_tokens"] == 1
        long = PROMPT | {"prompt": "word " * 100, "truncate_prompt_tokens": -1, "max_tokens": 1}
        assert (await cluster.http.post("/v1/completions", json=long)).json()["usage"]["prompt_tokens"] == 63
        chat = (await cluster.http.post("/v1/chat/completions", json=SAID | own)).json()
        assert chat["prompt_token_ids"] == [CHAT[-1]]
        status, error = await post(cluster, **(PROMPT | {"truncation_side": "middle"}))
    assert status == 400
    assert error["param"] == "truncation_side"


async def test_a_request_may_bring_its_template_within_the_same_bounds(template: Path) -> None:
    own = "<{{ messages[0].content }}{{ mood }}>"
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        path = "/v1/chat/completions"
        body = SAID | {"chat_template": own, "chat_template_kwargs": {"mood": "!"}, "return_token_ids": True}
        found = (await cluster.http.post(path, json=body)).json()
        assert found["prompt_token_ids"] == TOKENIZER.encode("<a!>").ids
        tokens = await cluster.http.post(
            "/tokenize", json={"messages": SAID["messages"], "chat_template": own}
        )
        assert tokens.json()["tokens"] == TOKENIZER.encode("<a>").ids
        endless = "{% for x in range(10 ** 9) %}{% for y in range(10 ** 9) %}{% endfor %}{% endfor %}"
        for source, sentence in (
            (endless, "chat_template cannot make a prompt of the messages: it "),
            ("{% if %}", "chat_template cannot make a prompt of the messages: it refuses"),
            ("{{ ''.__class__.__mro__ }}", "chat_template cannot make a prompt of the messages: it refuses"),
            ("x" * ((1 << 20) + 1), "chat_template has 1048577 bytes; it must have at most 1048576"),
        ):
            status, error = await post(cluster, path, **(SAID | {"chat_template": source}))
            assert (status, error["message"][: len(sentence)]) == (400, sentence)
        again = await cluster.http.post(path, json=SAID | {"return_token_ids": True})
        assert again.json()["prompt_token_ids"] == list(CHAT), "the model's own is as it was"


async def test_a_model_without_a_template_is_asked_by_that_of_the_request() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        body = SAID | {"chat_template": "{{ messages[0].content }}", "return_token_ids": True}
        found = (await cluster.http.post("/v1/chat/completions", json=body)).json()
    assert found["prompt_token_ids"] == TOKENIZER.encode("a").ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_may_begin_with_the_message_that_it_continues(stream: bool, template: Path) -> None:
    user = {"role": "user", "content": "a"}
    assistant = {"role": "assistant", "content": "So be it"}
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        for messages, others, echoed in (
            ([user, assistant], {"continue_final_message": True, "add_generation_prompt": False}, "So be it"),
            ([user, assistant], {}, "So be it"),
            ([user], {}, ""),
            ([user], {"add_generation_prompt": False}, "a"),
        ):
            body = SAID | {"messages": messages, "stream": stream} | others
            texts = []
            for echo in (True, False):
                answer = await cluster.http.post("/v1/chat/completions", json=body | {"echo": echo})
                if stream:
                    choices = [piece["choices"][0]["delta"] for piece in pieces_of(answer.text)]
                    texts.append("".join(delta.get("content") or "" for delta in choices))
                else:
                    texts.append(answer.json()["choices"][0]["message"]["content"])
            assert texts[0] == echoed + texts[1]


async def test_the_tokenizers_configuration_is_shown(template: Path) -> None:
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        info = (await cluster.http.get("/tokenizer_info")).json()
    assert info["chat_template"] == TEMPLATE
    assert info["tokenizer_class"]
