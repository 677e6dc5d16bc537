"""From a body to the completions that it asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from coordinator.http.chat import Chats
from coordinator.http.schema import Chat, ChatBody, Sampled
from coordinator.http.tools import HARMONY
from coordinator.requests.plan import Models, keep_out
from coordinator.requests.validation import REQUEST_RULES, TokenizedRequest
from coordinator.settings.coordinator import RequestBounds
from tandem.config.rule import broken, refuse
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest

Prompt = str | tuple[int, ...]

_OPTIONS = frozenset(field.name for field in fields(GenerationRequest))


async def requests_of(
    body: Sampled, models: Models, chats: Chats, bounds: RequestBounds
) -> list[GenerationRequest]:
    """A request for each completion: those of the first prompt, then those of the second."""
    sentences = list(body.refusals())
    if isinstance(body, ChatBody) and body.may_call and bounds.structured_output == "refuse":
        sentences.append(
            "tools is set and structured_output is refuse; it must be empty, or tool_choice none"
        )
    try:
        prompts: list[Prompt] = (
            [await chat_prompt(body, models, chats, bounds)] if isinstance(body, ChatBody) else body.prompts
        )
    except InvalidRequestError as error:
        raise InvalidRequestError("; ".join([*sentences, str(error)])) from None
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them. The first request stands for all: their number
        # may be what is wrong.
        refuse(sentences + await _broken_later(_request(body, prompts[0], 0), models, bounds))
    common: dict[str, Any] = {"grammar": body.grammar}
    if isinstance(body, ChatBody) and chats.calls == HARMONY:
        common["with_special_tokens"] = True
    return [_request(body, prompt, choice, **common) for prompt in prompts for choice in range(body.choices)]


async def ids_of(prompt: Prompt, models: Models, bounds: RequestBounds) -> tuple[int, ...]:
    """A prompt as ids."""
    return await models.encode(prompt, bounds) if isinstance(prompt, str) else prompt


async def _broken_later(request: GenerationRequest, models: Models, bounds: RequestBounds) -> list[str]:
    """A sentence for each rule that a request would break once it has its place."""
    try:
        prompt = await ids_of(request.prompt, models, bounds)
    except InvalidRequestError as error:
        return [str(error)]
    if keep_out(request, bounds, models):
        request = replace(request, speculation=False)
    return broken(REQUEST_RULES, TokenizedRequest(request, prompt, models.target, models.draft))


async def chat_prompt(body: Chat, models: Models, chats: Chats, bounds: RequestBounds) -> tuple[int, ...]:
    """The prompt that a chat makes."""
    named: dict[str, Any] = {}
    if isinstance(body, ChatBody):
        named |= {"tools": body.tools} if body.may_call else {}
        named |= {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    return await chats.prompt(
        [message.fields for message in body.messages or ()],
        models,
        bounds,
        (body.chat_template_kwargs or {}) | named,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


def _request(body: Sampled, prompt: Prompt, choice: int, **others: Any) -> GenerationRequest:
    # What has the same name means the same; what differs follows.
    values = {
        name: value
        for name in _OPTIONS & type(body).model_fields.keys()
        if (value := getattr(body, name)) is not None
    }
    values |= {
        "prompt": prompt,
        "max_tokens": body.default_max_tokens if body.token_limit is None else body.token_limit,
        "max_tokens_must_fit": body.token_limit is not None,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logprobs": body.alternatives,
        "probabilities": body.return_probabilities,
        "with_special_tokens": not body.skip_special_tokens,
        **others,
    }
    if body.top_k == -1:
        values["top_k"] = 0
    if body.seed is not None and choice:
        # The choices of one prompt have consecutive seeds from the request's own on, within 64 bits.
        values["seed"] = (body.seed + choice + 2**63) % 2**64 - 2**63
    return GenerationRequest(**values)
