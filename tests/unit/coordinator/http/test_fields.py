"""Every row of the table in docs/http.md holds: accepted fields are accepted, refused ones refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coordinator.decoding.tokenization import PromptEncoder
from coordinator.http.api import requests_of
from coordinator.http.chat import ChatTemplate
from coordinator.http.schema import (
    FIELDS,
    ChatBody,
    CompletionBody,
    Effect,
    Endpoint,
    FieldRow,
    KnownFields,
    Message,
    rows_of,
)
from coordinator.requests.plan import Models
from coordinator.requests.validation import TokenizedRequest, check_bounds, check_request
from coordinator.settings.coordinator import RequestBounds
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, ModelFeature
from tests.unit.coordinator.http.test_bodies import INFO, TOKENIZER

MODEL = replace(INFO, features=frozenset(ModelFeature))
MODELS = Models(MODEL, MODEL, PromptEncoder(TOKENIZER))
TEMPLATE = ChatTemplate(
    "{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
    "test",
)
BOUNDS = RequestBounds()


@pytest.fixture(scope="module", autouse=True)
def template_process() -> Iterator[None]:
    """Ends the template's process."""
    yield
    TEMPLATE.close()


PLAIN: dict[Endpoint, tuple[type[BaseModel], dict[str, Any]]] = {
    Endpoint.COMPLETIONS: (CompletionBody, {"prompt": "x"}),
    Endpoint.CHAT: (ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
}

CASES = [
    pytest.param(row, endpoint, id=f"{row.name}-{endpoint.value}")
    for row in FIELDS
    for endpoint in PLAIN
    if row.stands_in(endpoint)
]


async def requested(endpoint: Endpoint, **values: Any) -> list[GenerationRequest]:
    """Return the requests of a body, after the checks that precede computation."""
    model, plain = PLAIN[endpoint]
    body: Any = model.model_validate(plain | values)
    requests = await requests_of(body, MODELS, TEMPLATE, BOUNDS)
    for request in requests:
        check_bounds(request, BOUNDS, 4, MODEL.max_length)
        prompt = (
            request.prompt
            if isinstance(request.prompt, tuple)
            else tuple(TOKENIZER.encode(request.prompt).ids)
        )
        check_request(TokenizedRequest(request, prompt, MODEL, MODEL))
    return requests


@pytest.mark.parametrize(("row", "endpoint"), CASES)
async def test_a_row_of_the_table(row: FieldRow, endpoint: Endpoint) -> None:
    plain = await requested(endpoint, **row.beside)
    for value in row.accepted:
        made = await requested(endpoint, **row.beside, **{row.name: value})
        if row.effect is Effect.WORKS and value not in (-1, 0):
            assert made != plain, f"{row.name} changes nothing"
        elif row.effect in (Effect.NOTHING, Effect.REFUSED):
            assert made == plain, f"{row.name} changes something"
    for value in row.refused:
        with pytest.raises((InvalidRequestError, ValidationError), match=_subject(row.name)):
            await requested(endpoint, **row.beside, **{row.name: value})


def _subject(name: str) -> str:
    """Return the fields that a refusal names."""
    return {"stop": "a stop string", "max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}.get(
        name, name
    )


def test_a_refused_field_is_named_with_its_reason() -> None:
    assert not [row.name for row in FIELDS if row.effect is Effect.REFUSED and not row.refused]


def test_the_table_has_every_field_that_is_known() -> None:
    chat, completions = rows_of(Endpoint.CHAT), rows_of(Endpoint.COMPLETIONS)
    assert set(chat) >= set(ChatBody.model_fields) - set(KnownFields.model_fields)
    assert set(completions) >= set(CompletionBody.model_fields) - set(KnownFields.model_fields)
    assert set(chat) | set(completions) == set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert len({row.name for row in FIELDS}) >= 40


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


async def test_a_final_assistant_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    (request,) = await requested(Endpoint.CHAT, messages=messages, continue_final_message=True)
    assert request.prompt == tuple(TOKENIZER.encode("<user>hi</s><assistant>Well, ").ids)
    with pytest.raises(InvalidRequestError, match="does not write the last message's text"):
        await requested(
            Endpoint.CHAT, messages=[{"role": "assistant", "content": " "}], continue_final_message=True
        )
