"""Bodies are counted before they are parsed; a field is taken or refused as docs/http.md says, and has its effect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NoReturn

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer

from tandem.errors import InvalidRequestError
from tandem.model.types import GenerationRequest, ModelInfo
from tandem_coordinator.decoding.tokenization import PromptEncoder
from tandem_coordinator.http.app import requests_of
from tandem_coordinator.http.bodies import BodyReader, JsonShape
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.http.headers import fit, header_value, ignored_header
from tandem_coordinator.http.responses import ResponsesBody
from tandem_coordinator.http.schema import ChatBody, CompletionBody, Message, Sampled, field_rows
from tandem_coordinator.requests.plan import Models
from tandem_coordinator.requests.validation import BoundedRequest, TokenizedRequest
from tandem_coordinator.settings.coordinator import CoordinatorSettings, HttpOptions
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
INFO = ModelInfo("m", "Fake", 2048, "hash", 64, "none")
MODELS = Models(INFO, INFO, PromptEncoder(TOKENIZER))
BOUNDS = CoordinatorSettings(target_address="localhost:1", max_prompt_bytes=1000)
CHATS = Chats(None)


@pytest.fixture(scope="module", autouse=True)
def template() -> Iterator[None]:
    """A template for all tests of the module, whose process ends with them."""
    source = (
        b"{{ mood }}{{ reasoning_effort }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        b"{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asyncio.run(CHATS.meet("m", {"chat_template.jinja": source}, is_checked=False))
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
        BoundedRequest(request, BOUNDS, INFO.max_length).check()
        prompt = request.prompt
        ids = prompt if isinstance(prompt, tuple) else tuple(TOKENIZER.encode(prompt).ids)
        TokenizedRequest(request, ids, INFO, INFO).check()
    return made


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
BOTH = (completion, chat)
ALONE = {"speculation": False}
PLAIN = {"messages": [{"role": "user", "content": "other"}], "prompt": [5, 6]}
BESIDE: dict[str, dict[str, Any]] = {
    "echo": ALONE,
    "frequency_penalty": ALONE,
    "presence_penalty": ALONE,
    "repetition_penalty": ALONE,
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tools": {"tool_choice": "none"},
    "tool_choice": {"tools": [TOOL]},
}
"""Fields that a field needs beside it."""
CHANGES: list[tuple[str, Any]] = [
    *PLAIN.items(),
    ("max_tokens", 9),
    ("max_completion_tokens", 9),
    ("min_tokens", 3),
    ("temperature", 0.5),
    ("top_p", 0.5),
    ("top_k", 5),
    ("min_p", 0.1),
    ("seed", 7),
    ("stop", "x"),
    ("stop", ["x", "y"]),
    ("stop_token_ids", [5]),
    ("include_stop_str_in_output", True),
    ("cache_salt", "pepper"),
    ("ignore_eos", True),
    ("logit_bias", {"5": 1.5}),
    ("allowed_token_ids", [5, 6]),
    ("bad_words", ["x"]),
    ("truncate_prompt_tokens", 3),
    ("truncation_side", "right"),
    ("prompt_logprobs", 2),
    ("priority", 3),
    ("chat_template", "{{ messages[0].content }}!"),
    ("frequency_penalty", 0.5),
    ("presence_penalty", 0.5),
    ("repetition_penalty", 1.2),
    ("n", 2),
    ("logprobs", True),
    ("logprobs", 5),
    ("top_logprobs", 3),
    ("chat_template_kwargs", {"mood": "calm"}),
    ("reasoning_effort", "low"),
    ("add_generation_prompt", False),
    ("continue_final_message", True),
    ("num_speculative_tokens", 3),
    ("rejection_sampling_strategy", "strict"),
    ("speculation", False),
    ("echo", True),
    ("return_probabilities", True),
    ("sampled_logprobs", True),
    ("skip_special_tokens", False),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}}),
    ("structured_outputs", {"json": {"type": "integer"}}),
    ("structured_outputs", {"json": "{}"}),
    ("structured_outputs", {"regex": "a+", "choice": None}),
    ("structured_outputs", {"choice": ["a", "b"]}),
    ("structured_outputs", {"grammar": 'root ::= "a"'}),
    ("structured_outputs", {"json_object": True}),
    ("guided_json", {"type": "integer"}),
    ("guided_regex", "a+"),
    ("guided_choice", ["a", "b"]),
    ("guided_grammar", 'root ::= "a"'),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
]
TAKEN: list[tuple[str, Any]] = [
    ("model", "m"),
    ("stream", True),
    ("stream_options", {"include_usage": True, "continuous_usage_stats": True}),
    ("request_id", "mine"),
    ("return_token_ids", True),
    ("return_tokens_as_token_ids", True),
    ("include_reasoning", False),
    ("session_id", "s"),
    ("prompt_cache_options", {}),
    ("prompt_cache_retention", "24h"),
    ("timeout_seconds", 5.0),
    ("user", "someone"),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("service_tier", "auto"),
    ("safety_identifier", "someone"),
    ("prompt_cache_key", "key"),
    ("parallel_tool_calls", True),
    ("best_of", 1),
    ("response_format", {"type": "text"}),
    ("structured_outputs", {}),
    ("tools", [TOOL]),
    ("tool_choice", "auto"),
    ("tool_choice", "none"),
    ("functions", []),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0; it must be at least 1"),
    ({"n": 17}, "n is 17; it must make at most 16 completions"),
    ({"n": 2, "prompt": ["x"] * 9}, "n is 2 for each of 9 prompts"),
    ({"stream_options": {"include_usage": True}}, "stream_options is set"),
    ({"logprobs": 21, "prompt": "x"}, "logprobs is 21"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21"),
    ({"top_logprobs": 2}, "top_logprobs is 2 and logprobs is not true"),
    ({"response_format": {"type": "xml"}},
        'response_format.type is "xml"; it must be text, json_object or json_schema'),
    ({"response_format": {"type": "json_schema"}},
        'response_format.json_schema is null; it must be an object with "sch'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema is [1]; it must be a JSON schema"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex is 5; it must be a text"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is []; it must be a list of texts"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object is false; it must be true"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs has regex, json; it must have one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs has structural_tag; it must have one of"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "the completion's form is given 2 times"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos is true and structured output is asked for"),
    ({"best_of": 3}, "best_of is 3; it must be n, 1"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []; it must hold an id, or be left out"),
    ({"bad_words": [""]}, "bad_words holds an empty text"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is 1 and stream is true; it must be 0 or left out"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be between 0 and 20"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1, or from 1 to 63"),
    ({"tools": [{"type": "function"}]}, 'tools.0 must be {"type": "function"'),
    ({"tools": [TOOL, TOOL]}, "tools.1 is named f as another is"),
    ({"tools": [TOOL], "tool_choice": "any"}, 'tool_choice is "any"; it must be none, auto, required, or'),
    ({"tools": [TOOL], "tool_choice": {"function": "f"}}, 'tool_choice is {"function": "f"}; it must be none,'),
    ({"tool_choice": "required"}, "tool_choice is required; tools must hold it"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}},
        "tool_choice is the function g; tools must hold it"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice demands a call and the text has a form"),
    ({"functions": [{"name": "f"}]}, "functions is set; it must be empty, or function_call none"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "one of them must be false"),
]  # fmt: skip
ASKING: dict[str, Any] = {
    "length_penalty": 0.5,
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "verbosity": "low",
    "suffix": "end",
}
"""Values that ask for what is not to be had, where `[1]` or the opposite of what is taken do not."""


def takes(make: Any, name: str, value: Any = None) -> bool:
    """True if the endpoint has the field; `logprobs` is of another type in each."""
    if name == "logprobs" and value is not None:
        return isinstance(value, bool) == (make is chat)
    if name == "echo" and value is not None:
        return bool(make is completion)  # a chat's answer has it, and its request does not
    return name in type(make()).model_fields


def each(cases: list[tuple[str, Any]]) -> list[Any]:
    """The cases for each endpoint that has the field."""
    found = [(make, *case) for case in cases for make in BOTH if takes(make, *case)]
    return [pytest.param(*case, id=f"{case[1]}-{case[0].__name__}") for case in found]


@pytest.mark.parametrize(("make", "name", "value"), each(CHANGES))
async def test_a_field_changes_the_request(make: Any, name: str, value: Any) -> None:
    beside = BESIDE.get(name, {})
    assert await requests(make(**beside, **{name: value})) != await requests(make(**beside))


@pytest.mark.parametrize(("make", "name", "value"), each(TAKEN))
async def test_a_field_is_taken(make: Any, name: str, value: Any) -> None:
    beside = BESIDE.get(name, {})
    assert await requests(make(**beside, **{name: value})) == await requests(make(**beside))


@pytest.mark.parametrize(("values", "sentence"), REFUSED)
async def test_a_value_is_refused(values: dict[str, Any], sentence: str) -> None:
    makers = [make for make in BOTH if all(takes(make, name) for name in values)]
    assert makers
    for make in makers:
        with pytest.raises(InvalidRequestError) as refusal:
            await requests(make(**values))
        assert sentence in str(refusal.value)


@pytest.mark.parametrize("make", BOTH)
async def test_what_is_not_to_be_had_is_refused_unless_it_asks_for_nothing(make: Any) -> None:
    plain = await requests(make())
    for name, field in type(make()).model_fields.items():
        extra: Any = field.json_schema_extra
        if extra is None:
            continue
        taken = extra["enum"]
        for value in taken:
            assert await requests(make(**{name: value})) == plain
        asking = not taken[-1] if isinstance(taken[-1], bool) else ASKING.get(name, [1])
        with pytest.raises(InvalidRequestError, match=f"^{name} is ") as refusal:
            await requests(make(**{name: asking}))
        assert str(refusal.value).endswith(extra["why"])


def test_every_field_is_tested_and_has_a_meaning() -> None:
    fields = CompletionBody.model_fields | ChatBody.model_fields
    tested = {name for name, _ in [*CHANGES, *TAKEN]} | {
        name for name, field in fields.items() if field.json_schema_extra
    }
    assert {name for name, _, _ in field_rows()} == set(fields) == tested
    assert all(meaning for _, _, meaning in field_rows())


async def test_options_arrive_as_they_are() -> None:
    """Every option of a request can be set, but for those that the endpoint decides itself."""
    own = {"row_kind", "grammar", "delivered_token_ids", "echo", "with_special_tokens", "probabilities"}
    own.add("truncation_side")  # by name
    names = {field.name for field in fields(GenerationRequest)} - own - {"max_tokens_must_fit"}
    options = {name: value for name, value in CHANGES if name in names and takes(completion, name, value)}
    assert options.keys() == names
    (request,) = await requests(completion(**options))
    assert request.max_tokens_must_fit
    for name, value in (options | {"logit_bias": {5: 1.5}}).items():
        assert getattr(request, name) == (tuple(value) if isinstance(value, list) else value)


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
    assert (await requests(completion(max_completion_tokens=5)))[0].max_tokens == 5
    assert (await requests(chat(logprobs=True, top_logprobs=4)))[0].logprobs == 4
    assert (await requests(chat(logprobs=True)))[0].logprobs == 0
    assert (await requests(chat(logprobs=False)))[0].logprobs is None
    assert (await requests(completion(stop="a")))[0].stop == ("a",)


class Untouched(PromptEncoder):
    """An encoder that must not be called."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> NoReturn:
        raise AssertionError(f"a text of {len(text)} characters was tokenized")


@pytest.mark.parametrize(
    "body", [chat(messages=[{"role": "user", "content": "é" * 500}], n=0), completion(prompt="x" * 1001, n=0)]
)
async def test_a_text_beyond_its_bound_is_not_tokenized(body: Sampled) -> None:
    models = Models(INFO, INFO, Untouched(TOKENIZER))
    with pytest.raises(InvalidRequestError, match=r"^n is 0; .* the prompt has 10\d\d bytes"):
        await requests_of(body, models, CHATS, BOUNDS)


async def test_one_error_names_broken_rules_of_both_kinds() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await requests(completion(best_of=3, temperature=-1.0, presence_penalty=3.0))
    for start in ("best_of is 3", "temperature is -1.0", "presence_penalty is 3.0"):
        assert start in str(refusal.value)


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


strings = st.text(st.sampled_from('\\",[]{}: abé\n'))
documents: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | strings,
    lambda inner: st.lists(inner) | st.dictionaries(strings, inner),
    max_leaves=40,
)


def counted(document: Any) -> tuple[int, int]:
    """Count the commas, and the brackets, braces and colons."""
    if not isinstance(document, dict | list):
        return 0, 0
    items = [*document.values()] if isinstance(document, dict) else document
    inner = [counted(item) for item in items]
    colons = len(items) if isinstance(document, dict) else 0
    commas = max(0, len(items) - 1)
    return commas + sum(each for each, _ in inner), 1 + colons + sum(each for _, each in inner)


@given(documents, st.booleans(), st.integers(1, 9))
def test_commas_and_brackets_outside_strings_are_counted(document: Any, ascii_only: bool, size: int) -> None:
    content = json.dumps(document, ensure_ascii=ascii_only).encode()
    shape = JsonShape(1 << 20, 1 << 20)
    for start in range(0, len(content), size):
        shape.feed(content[start : start + size])
    shape.feed(b"")
    assert (shape.values, shape.containers) == counted(document)


BODY = b'{"prompt": "x", "foo": 1, "stream": true, "stream_options": {"bar": 2}}'


def test_strict_requests_have_no_unknown_fields() -> None:
    reader = BodyReader(HttpOptions(strict_requests=True))
    with pytest.raises(InvalidRequestError, match=r"^foo is not an option .*; stream_options\.bar is not"):
        reader.parse(CompletionBody, BODY)
    responses = b'{"input": [{"role": "user", "content": "x", "phase": 1}]}'
    with pytest.raises(InvalidRequestError, match=r"input\.0\.phase is not an option"):
        reader.parse(ResponsesBody, responses)
    assert BodyReader(HttpOptions()).parse(ResponsesBody, responses)[1] == ("input.0.phase",)


def test_what_is_wrong_in_the_text_of_a_response_is_named_as_the_client_sent_it() -> None:
    content = b'{"input": "x", "text": {"verbosity": "low", "tone": 1, "format": {"type": "%s"}}}'
    verbosity = 'text.verbosity is "low"; it must be "medium": the model has no such setting'
    for kind, sentence in (
        (b"xml", 'text.format.type is "xml"; it must be text, json_object or json_schema'),
        (b"json_schema", "text.format.schema is null; it must be a JSON schema"),
    ):
        body, unknown = BodyReader(HttpOptions()).parse(ResponsesBody, content % kind)
        assert ([*body.refusals()], unknown) == ([verbosity, sentence], ("text.tone",))


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(HttpOptions())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            body, names = reader.parse(CompletionBody, BODY)
            assert (body.prompt, body.stream_options is not None) == ("x", True)
            assert sorted(names) == ["foo", "stream_options.bar"]
    assert len(caplog.records) == 2
    with pytest.raises(ValidationError, match="max_tokens"):
        reader.parse(CompletionBody, b'{"prompt": "x", "foo": 1, "max_tokens": "5"}')


def is_sendable(name: str, value: bytes) -> bool:
    try:
        h11.Response(status_code=200, headers=[(name.encode(), value)])
    except h11.LocalProtocolError:
        return False
    return True


def test_a_name_cannot_add_a_header() -> None:
    header = ignored_header("a\r\nSet-Cookie: b", "tools")
    assert header == {"X-Tandem-Ignored": "a??Set-Cookie??b, tools"}
    assert ignored_header() == {}


@given(st.lists(st.text(), min_size=1, max_size=20))
def test_a_header_of_ignored_fields_can_be_sent_whatever_they_are_named(names: list[str]) -> None:
    """Names are a client's: JSON keys may be empty, end with spaces and hold control characters."""
    ((name, value),) = ignored_header(*names).items()
    assert is_sendable(name, value.encode("latin-1"))
    assert len(value.split(", ")) == min(len(names), 16)


@given(st.binary(max_size=300))
def test_any_value_can_be_sent(value: bytes) -> None:
    found = header_value(value)
    assert is_sendable("x-request-id", found)
    assert found == value or not is_sendable("x-request-id", value) or set(value) & {*range(32), 127}
    assert is_sendable("x-request-id", fit(value.decode("latin-1")).encode())
