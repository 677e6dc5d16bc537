"""The fields of an HTTP body, and the requests made from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, get_type_hints

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from coordinator.decoding.tokenization import PromptEncoder
from coordinator.http.api import requests_of
from coordinator.http.chat import ChatTemplate
from coordinator.http.schema import HTTP_RULES, Body, ChatBody, CompletionBody, Sampled
from coordinator.requests.plan import Models
from coordinator.settings.coordinator import RequestBounds
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, ModelInfo
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
INFO = ModelInfo("m", "Fake", 2048, "hash", 64, "none")
MODELS = Models(INFO, INFO, PromptEncoder(TOKENIZER))
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {}, "test")


@pytest.fixture(scope="module", autouse=True)
def _template_ends() -> Iterator[None]:
    yield
    TEMPLATE.close()


BOUNDS = RequestBounds(max_prompt_bytes=1000)


class Untouched(PromptEncoder):
    """An encoder that must not be called."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> NoReturn:
        raise AssertionError(f"a text of {len(text)} characters was tokenized")


def completion(**values: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x"} | values)


def chat(**values: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]} | values)


async def requests(body: Body) -> list[GenerationRequest]:
    return await requests_of(body, MODELS, TEMPLATE, BOUNDS)


async def test_every_option_arrives() -> None:
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
        "include_stop_str_in_output": True,
    }
    ends: dict[str, Any] = {"stop_token_ids": [7, 8], "logit_bias": {"5": -1.0}}
    (request,) = await requests(completion(**options, **ends, stop=["a", "b"], max_tokens=9, logprobs=3))
    assert request == GenerationRequest(
        "x",
        **options,
        stop=("a", "b"),
        max_tokens=9,
        logprobs=3,
        stop_token_ids=(7, 8),
        logit_bias={5: -1.0},
        max_tokens_must_fit=True,
    )


async def test_a_bias_is_for_a_token_id() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias is for something else than a token id"):
        await requests(completion(logit_bias={"the": 1.0}))


async def test_a_body_accepts_every_option_of_a_request() -> None:
    """A new option of GenerationRequest must be accepted here too, or left out on purpose."""
    elsewhere = {"prompt": "prompt", "max_tokens": "max_tokens", "stop": "stop", "logprobs": "logprobs"}
    elsewhere |= {
        "logit_bias": "logit_bias",
        "stop_token_ids": "stop_token_ids",
        "max_tokens_must_fit": "max_tokens",
    }
    flags = {"ignore_eos", "speculation"}
    # Which rows travel is no concern of a client that speaks OpenAI's API.
    left_out = {"row_kind"}
    assert set(get_type_hints(GenerationRequest)) == {*Sampled.shared, *elsewhere, *flags, *left_out}


async def test_unset_fields_are_left_to_the_coordinator() -> None:
    assert await requests(completion()) == [GenerationRequest("x", max_tokens=16)]
    (request,) = await requests(chat())
    assert request == GenerationRequest(tuple(TOKENIZER.encode("user: hi\n").ids))


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
async def test_prompts_come_in_four_forms(prompt: object, prompts: list[object]) -> None:
    assert [request.prompt for request in await requests(completion(prompt=prompt))] == prompts


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
    assert (await requests(chat(max_tokens=3)))[0].max_tokens == 3
    assert (await requests(chat(logprobs=True, top_logprobs=4)))[0].logprobs == 4
    assert (await requests(chat(logprobs=True)))[0].logprobs == 0
    assert (await requests(chat(logprobs=False)))[0].logprobs is None
    assert (await requests(completion(stop="a")))[0].stop == ("a",)


ONE_CHOICE = "it must make at most 16 completions"
REFUSALS: list[tuple[str, Body, str]] = [
    ("echo", completion(echo=True), "echo is true; it must be false"),
    (
        "structured-output",
        chat(response_format={"type": "json_object"}),
        "response_format is json_object; it must",
    ),
    ("tools", chat(tools=[{"type": "function"}]), "tools is set; it must be empty, or tool_choice none"),
    ("tools", chat(tool_choice="required"), "tool_choice is required; it must be none"),
    (
        "tools",
        chat(functions=[{"name": "f"}], function_call={"name": "f"}),
        "functions is set; it must be empty, or function_call none: this",
    ),
    ("known-fields", completion(use_beam_search=True), "use_beam_search is true; it must be false: this"),
    ("known-fields", completion(modalities=["text"]), "modalities is not an option of this request"),
    (
        "final-message",
        chat(continue_final_message=True, add_generation_prompt=True),
        "add_generation_prompt is true and continue_final_message too",
    ),
    ("best-of", completion(best_of=3), "best_of is 3; it must be n, 1"),
    ("suffix", completion(suffix="end"), "suffix is set; it must be empty"),
    ("choices", completion(n=0), "n is 0; it must be at least 1"),
    ("choices", chat(n=17), f"n is 17; {ONE_CHOICE}"),
    ("choices", completion(prompt=["x"] * 9, n=2), f"n is 2 for each of 9 prompts; {ONE_CHOICE}"),
    (
        "stream-options",
        chat(stream_options={"include_usage": True}),
        "stream_options is set; it goes with stream true",
    ),
    ("top-logprobs", chat(top_logprobs=2), "top_logprobs is 2 and logprobs is not true"),
    ("messages", chat(messages=[]), "messages is empty; it must hold at least one message"),
]


@pytest.mark.parametrize(("rule", "body", "sentence"), REFUSALS)
async def test_unsupported_fields_are_refused(rule: str, body: Body, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await requests(body)
    assert str(refusal.value).startswith(sentence)


TOO_LONG = "x" * 1001


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            chat(messages=[{"role": "user", "content": "é" * 500}]),
            "the prompt has 1007 bytes; it must be at most 1000",
        ),
        (
            chat(messages=[{"role": "user", "content": TOO_LONG}], n=0),
            "n is 0; it must be at least 1; the prompt has 1008 bytes; it must be at most 1000",
        ),
        (
            completion(prompt=TOO_LONG, n=0),
            "n is 0; it must be at least 1; the prompt has 1001 bytes; it must be at most 1000",
        ),
    ],
)
async def test_a_text_beyond_its_bound_is_not_tokenized(body: Body, said: str) -> None:
    models = Models(INFO, INFO, Untouched(TOKENIZER))
    with pytest.raises(InvalidRequestError) as refusal:
        await requests_of(body, models, TEMPLATE, BOUNDS)
    assert str(refusal.value) == said


def test_every_rule_is_shown() -> None:
    assert {rule.name for rule in HTTP_RULES} == {rule for rule, _, _ in REFUSALS}


@pytest.mark.parametrize(
    "body",
    [
        completion(best_of=1, logit_bias={}, suffix="", echo=False, response_format={"type": "text"}),
        chat(tools=[], tool_choice="none", functions=[], function_call="auto", user="me", store=False),
    ],
)
async def test_fields_without_effect_are_accepted(body: Body) -> None:
    assert len(await requests(body)) == 1


async def test_one_error_names_broken_rules_of_both_kinds() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await requests(completion(echo=True, temperature=-1.0, presence_penalty=1.0))
    for sentence in (
        "echo is true",
        "temperature is -1.0",
        "presence_penalty is 1.0; with a separate draft model",
    ):
        assert sentence in str(refusal.value)


async def test_a_chats_special_tokens_are_written_by_its_template_alone() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    begin = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    template = ChatTemplate(begin + "{{ messages[0].content }}", {}, "test")
    (request,) = await requests_of(chat(), Models(INFO, INFO, PromptEncoder(tokenizer)), template, BOUNDS)
    template.close()
    assert request.prompt == tuple(tokenizer.encode("hi").ids)
    assert request.prompt.count(tokenizer.token_to_id(begin)) == 1


async def test_a_model_without_a_template_does_not_chat() -> None:
    with pytest.raises(InvalidRequestError, match=r"the model m has no chat template; send a prompt instead"):
        await requests_of(chat(), MODELS, None, BOUNDS)
