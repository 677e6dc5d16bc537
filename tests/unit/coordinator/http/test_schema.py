"""The fields of a body: each is taken or refused as docs/http.md says, and reaches the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NoReturn

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from coordinator.decoding.tokenization import PromptEncoder
from coordinator.http.api import requests_of
from coordinator.http.chat import Chats, ChatTemplate
from coordinator.http.openapi import field_rows
from coordinator.http.schema import ChatBody, CompletionBody, Message, Sampled
from coordinator.requests.plan import Models
from coordinator.requests.validation import TokenizedRequest, check_bounds, check_request
from coordinator.settings.coordinator import RequestBounds
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, ModelFeature, ModelInfo
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
INFO = ModelInfo("m", "Fake", 2048, "hash", 64, "none", features=frozenset(ModelFeature))
MODELS = Models(INFO, INFO, PromptEncoder(TOKENIZER))
BOUNDS = RequestBounds(max_prompt_bytes=1000)
CHATS = Chats(None)


@pytest.fixture(scope="module", autouse=True)
def template() -> Iterator[None]:
    """A template for all tests of the module, whose process ends with them."""
    CHATS.template = ChatTemplate(
        "{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        {},
        "test",
    )
    yield
    CHATS.close()


def completion(**values: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "x"} | values))


def chat(**values: Any) -> ChatBody:
    return ChatBody.model_validate_json(
        json.dumps({"messages": [{"role": "user", "content": "hi"}]} | values)
    )


async def requests(body: Sampled) -> list[GenerationRequest]:
    """The requests of a body, after the checks that precede computation."""
    made = await requests_of(body, MODELS, CHATS, BOUNDS)
    for request in made:
        check_bounds(request, BOUNDS, 4, INFO.max_length)
        prompt = request.prompt
        ids = prompt if isinstance(prompt, tuple) else tuple(TOKENIZER.encode(prompt).ids)
        check_request(TokenizedRequest(request, ids, INFO, INFO))
    return made


BOTH = (completion, chat)
ALONE = {"speculation": False}
WORKS: list[tuple[str, Any, dict[str, Any], tuple[Any, ...]]] = [
    ("max_tokens", 9, {}, BOTH),
    ("max_completion_tokens", 9, {}, (chat,)),
    ("min_tokens", 3, {}, BOTH),
    ("temperature", 0.5, {}, BOTH),
    ("top_p", 0.5, {}, BOTH),
    ("top_k", 5, {}, BOTH),
    ("min_p", 0.1, {}, BOTH),
    ("seed", 7, {}, BOTH),
    ("stop", "x", {}, BOTH),
    ("stop", ["x", "y"], {}, BOTH),
    ("stop_token_ids", [5], {}, BOTH),
    ("include_stop_str_in_output", True, {}, BOTH),
    ("ignore_eos", True, {}, BOTH),
    ("logit_bias", {"5": 1.5}, {}, BOTH),
    ("frequency_penalty", 0.5, ALONE, BOTH),
    ("presence_penalty", 0.5, ALONE, BOTH),
    ("repetition_penalty", 1.2, ALONE, BOTH),
    ("n", 2, {}, BOTH),
    ("logprobs", 5, {}, (completion,)),
    ("logprobs", True, {}, (chat,)),
    ("top_logprobs", 3, {"logprobs": True}, (chat,)),
    ("chat_template_kwargs", {"mood": "calm"}, {}, (chat,)),
    ("add_generation_prompt", False, {}, (chat,)),
    ("continue_final_message", True, {}, (chat,)),
    ("num_speculative_tokens", 3, {}, BOTH),
    ("rejection_sampling_strategy", "strict", {}, BOTH),
    ("speculation", False, {}, BOTH),
    ("prompt", [5, 6], {}, (completion,)),
    ("messages", [{"role": "user", "content": "other"}], {}, (chat,)),
]
NO_EFFECT: list[tuple[str, Any, dict[str, Any], tuple[Any, ...]]] = [
    ("model", "m", {}, BOTH),
    ("stream", True, {}, BOTH),
    ("stream_options", {"include_usage": True}, {"stream": True}, BOTH),
    ("return_token_ids", True, {}, BOTH),
    ("timeout_seconds", 5.0, {}, BOTH),
    ("user", "someone", {}, BOTH),
    ("metadata", {"a": "b"}, {}, BOTH),
    ("store", True, {}, BOTH),
    ("service_tier", "auto", {}, BOTH),
    ("safety_identifier", "someone", {}, BOTH),
    ("prompt_cache_key", "key", {}, BOTH),
    ("parallel_tool_calls", True, {}, (chat,)),
    ("best_of", 1, {}, (completion,)),
    ("tools", [{"type": "function", "function": {"name": "f"}}], {"tool_choice": "none"}, (chat,)),
    ("functions", [], {}, (chat,)),
]
REFUSED: list[tuple[str, Any, dict[str, Any], tuple[Any, ...], str]] = [
    ("max_tokens", 0, {}, BOTH, "max_tokens is 0"),
    ("max_tokens", 64, {}, BOTH, "max_tokens is 64"),
    ("min_tokens", 64, {}, BOTH, "min_tokens is 64"),
    ("temperature", -1, {}, BOTH, "temperature is -1"),
    ("top_p", 1.5, {}, BOTH, "top_p is 1.5"),
    ("min_p", 2, {}, BOTH, "min_p is 2"),
    ("seed", 2**70, {}, BOTH, "seed is"),
    ("stop", [""], {}, BOTH, "a stop string is empty"),
    ("stop_token_ids", [-1], {}, BOTH, "stop_token_ids is for"),
    ("logit_bias", {"5": 101}, {}, BOTH, "logit_bias is 101"),
    ("frequency_penalty", 3, ALONE, BOTH, "frequency_penalty is 3"),
    ("frequency_penalty", 1, {}, BOTH, "frequency_penalty is 1.0; with a separate draft model"),
    ("presence_penalty", 3, ALONE, BOTH, "presence_penalty is 3"),
    ("repetition_penalty", 0, ALONE, BOTH, "repetition_penalty is 0"),
    ("n", 0, {}, BOTH, "n is 0; it must be at least 1"),
    ("n", 17, {}, BOTH, "n is 17; it must make at most 16 completions"),
    ("n", 2, {"prompt": ["x"] * 9}, (completion,), "n is 2 for each of 9 prompts"),
    ("stream_options", {"include_usage": True}, {}, BOTH, "stream_options is set; it goes with stream true"),
    ("logprobs", 21, {}, (completion,), "logprobs is 21"),
    ("top_logprobs", 21, {"logprobs": True}, (chat,), "logprobs is 21"),
    ("top_logprobs", 2, {}, (chat,), "top_logprobs is 2 and logprobs is not true"),
    ("num_speculative_tokens", 0, {}, BOTH, "num_speculative_tokens is 0"),
    ("best_of", 3, {}, (completion,), "best_of is 3; it must be n, 1"),
    ("tools", [{"type": "function"}], {}, (chat,), "tools is set; it must be empty, or tool_choice none"),
    (
        "functions",
        [{"name": "f"}],
        {"function_call": "auto"},
        (chat,),
        "functions is set; it must be empty, or function_call none",
    ),
    (
        "continue_final_message",
        True,
        {"add_generation_prompt": True},
        (chat,),
        "add_generation_prompt is true and continue_final_message too",
    ),
]
ASKING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "use_beam_search": True,
    "length_penalty": 0.5,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "prompt_logprobs": 1,
    "logits_processors": ["x"],
    "priority": 1,
    "return_tokens_as_token_ids": True,
    "cache_salt": "salt",
    "request_id": "mine",
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "echo": True,
    "suffix": "end",
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "audio": {"voice": "a"},
    "mm_processor_kwargs": {"a": 1},
    "prediction": {"type": "content"},
    "web_search_options": {"a": 1},
    "reasoning_effort": "high",
    "verbosity": "low",
    "include_reasoning": False,
    "documents": [{"a": "b"}],
    "chat_template": "x",
}
"""A value of each field that is known and not to be had, which asks for something."""


def each(cases: list[Any]) -> list[Any]:
    """The cases for each of their endpoints."""
    return [
        pytest.param(make, *case[:3], *case[4:], id=f"{case[0]}-{make.__name__}")
        for case in cases
        for make in case[3]
    ]


@pytest.mark.parametrize(("make", "name", "value", "beside"), each(WORKS))
async def test_a_field_changes_the_request(make: Any, name: str, value: Any, beside: dict[str, Any]) -> None:
    assert await requests(make(**beside, **{name: value})) != await requests(make(**beside))


@pytest.mark.parametrize(("make", "name", "value", "beside"), each(NO_EFFECT))
async def test_a_field_is_taken(make: Any, name: str, value: Any, beside: dict[str, Any]) -> None:
    assert await requests(make(**beside, **{name: value})) == await requests(make(**beside))


@pytest.mark.parametrize(("make", "name", "value", "beside", "sentence"), each(REFUSED))
async def test_a_value_is_refused(
    make: Any, name: str, value: Any, beside: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await requests(make(**beside, **{name: value}))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("make", BOTH)
async def test_what_is_not_to_be_had_is_refused_unless_it_asks_for_nothing(make: Any) -> None:
    plain = await requests(make())
    marked = {name: info.json_schema_extra for name, info in type(make()).model_fields.items()}
    for name, extra in marked.items():
        if not isinstance(extra, dict):
            continue
        taken: Any = extra["enum"]
        for value in taken:
            assert await requests(make(**{name: value})) == plain
        asking = ASKING.get(name, not taken[-1])
        with pytest.raises(InvalidRequestError, match=f"^{name} is ") as refusal:
            await requests(make(**{name: asking}))
        assert str(refusal.value).endswith(str(extra["why"]))


def test_every_field_is_shown_and_has_a_meaning() -> None:
    rows = list(field_rows())
    tested = {name for name, *_ in [*WORKS, *NO_EFFECT]} | {*ASKING, "add_special_tokens"}
    assert {name for name, _, _ in rows} == tested
    assert all(meaning for _, _, meaning in rows)


@pytest.mark.parametrize(
    ("make", "values", "field"),
    [
        (completion, {"modalities": ["text"]}, "modalities"),
        (completion, {"max_tokens": "5"}, "max_tokens"),
        (completion, {"logit_bias": {"the": 1.0}}, "logit_bias"),
        (completion, {"timeout_seconds": 0}, "timeout_seconds"),
        (chat, {"messages": []}, "messages"),
        (chat, {"prompt": "x"}, "prompt"),
    ],
)
def test_a_wrong_type_or_field_is_refused(make: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        make(**values)
    assert refusal.value.errors()[0]["loc"][0] == field


async def test_options_arrive_as_they_are() -> None:
    """Every option of a request can be set, but for which rows travel."""
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "seed": 5,
        "num_speculative_tokens": 3,
        "rejection_sampling_strategy": "strict",
        "ignore_eos": True,
        "speculation": False,
        "min_tokens": 2,
        "max_tokens": 9,
        "logprobs": 3,
        "include_stop_str_in_output": True,
    }
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [7, 8]}
    (request,) = await requests(completion(**options, **lists, logit_bias={"5": -1.0}))
    expected = options | {name: tuple(value) for name, value in lists.items()}
    expected |= {"prompt": "x", "logit_bias": {5: -1.0}, "max_tokens_must_fit": True}
    assert request == GenerationRequest(**expected)
    assert {field.name for field in fields(GenerationRequest)} == {*expected, "row_kind"}


async def test_unset_fields_are_left_to_the_coordinator() -> None:
    assert await requests(completion()) == [GenerationRequest("x", max_tokens=16)]
    (request,) = await requests(chat())
    assert request == GenerationRequest(tuple(TOKENIZER.encode("<user>hi</s><assistant>").ids))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([], [()]),
        ([[]], [()]),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, prompts: list[object]) -> None:
    assert completion(prompt=prompt).prompts == prompts


async def test_choices_have_seeds_of_their_own() -> None:
    made = await requests(completion(prompt=["x", "y"], n=2, seed=2**63 - 1))
    assert [(request.prompt, request.seed) for request in made] == [
        ("x", 2**63 - 1),
        ("x", -(2**63)),
        ("y", 2**63 - 1),
        ("y", -(2**63)),
    ]


async def test_synonyms_set_the_same_option() -> None:
    assert (await requests(completion(top_k=-1)))[0].top_k == 0
    assert (await requests(chat(max_tokens=3, max_completion_tokens=5)))[0].max_tokens == 5
    assert (await requests(chat(logprobs=True, top_logprobs=4)))[0].logprobs == 4
    assert (await requests(chat(logprobs=True)))[0].logprobs == 0
    assert (await requests(chat(logprobs=False)))[0].logprobs is None
    assert (await requests(completion(stop="a")))[0].stop == ("a",)


class Untouched(PromptEncoder):
    """An encoder that must not be called."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> NoReturn:
        raise AssertionError(f"a text of {len(text)} characters was tokenized")


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "user", "content": "é" * 500}], n=0),
        completion(prompt="x" * 1001, n=0),
    ],
)
async def test_a_text_beyond_its_bound_is_not_tokenized(body: Sampled) -> None:
    models = Models(INFO, INFO, Untouched(TOKENIZER))
    with pytest.raises(InvalidRequestError, match=r"^n is 0; .* the prompt has 10\d\d bytes"):
        await requests_of(body, models, CHATS, BOUNDS)


async def test_one_error_names_broken_rules_of_both_kinds() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await requests(completion(echo=True, temperature=-1.0, presence_penalty=1.0))
    for start in ("echo is true", "temperature is -1.0", "presence_penalty is 1.0"):
        assert start in str(refusal.value)


async def test_a_chats_special_tokens_are_written_by_its_template_alone() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    begin = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    chats = Chats(None)
    chats.template = ChatTemplate(begin + "{{ messages[0].content }}", {}, "test")
    (request,) = await requests_of(chat(), Models(INFO, INFO, PromptEncoder(tokenizer)), chats, BOUNDS)
    chats.close()
    assert request.prompt == tuple(tokenizer.encode("hi").ids)


async def test_a_model_without_a_template_does_not_chat() -> None:
    with pytest.raises(InvalidRequestError, match="the model m has no chat template"):
        await requests_of(chat(), MODELS, Chats(None), BOUNDS)


async def test_a_final_assistant_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    (request,) = await requests(chat(messages=messages, continue_final_message=True))
    assert request.prompt == tuple(TOKENIZER.encode("<user>hi</s><assistant>Well, ").ids)
    for content, sentence in ((" ", "does not write the last message's text"), ([], "must be a text")):
        unfit: list[Any] = [{"role": "assistant", "content": content}]
        with pytest.raises(InvalidRequestError, match=sentence):
            await requests(chat(messages=unfit, continue_final_message=True))


@pytest.mark.parametrize(
    "content", [None, "hi", [{"type": "text", "text": "hi"}, {"type": "image", "n": [1]}]]
)
def test_a_message_reaches_its_template_with_everything_that_came(content: object) -> None:
    came = {
        "role": "user",
        "content": content,
        "name": "ann",
        "tool_calls": [{"id": 1, "function": {"n": None}}],
    }
    message = Message.model_validate(came)
    assert message.fields == message.model_dump() == came
