"""From a body to the completions that it asks for."""

from __future__ import annotations

from dataclasses import replace

from coordinator.http.chat.chats import ids_of_chat, text_of_chat
from coordinator.http.chat.template import ChatTemplate
from coordinator.http.openai.final_message import open_ended
from coordinator.http.openai.rules import HTTP_RULES, Body
from coordinator.http.openai.schema import ChatBody, CompletionBody
from coordinator.requests.plan import Models, goes_without_drafting
from coordinator.requests.validation import REQUEST_RULES, TokenizedRequest, too_much_text
from coordinator.settings.coordinator import RequestBounds
from tandem.config.rule import broken
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest

_SEEDS = 1 << 64


async def requests_of(
    body: Body, models: Models, template: ChatTemplate | None, bounds: RequestBounds
) -> list[GenerationRequest]:
    """A request for each completion: those of the first prompt, then those of the second.

    Raises:
        InvalidRequestError: with a sentence for each rule that the body breaks.
    """
    sentences = broken(HTTP_RULES, body)
    try:
        prompts = await _prompts(body, models, template, bounds)
    except InvalidRequestError as error:
        raise InvalidRequestError("; ".join([*sentences, str(error)])) from None
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them. The first request stands for all: their number
        # may be what is wrong.
        for prompt in prompts[:1]:
            sentences += await _broken_later(_request(body, prompt, 0), prompt, models, bounds)
        raise InvalidRequestError("; ".join(sentences))
    return [_request(body, prompt, choice) for prompt in prompts for choice in range(body.choices)]


async def _broken_later(
    request: GenerationRequest, prompt: str | tuple[int, ...], models: Models, bounds: RequestBounds
) -> list[str]:
    """A sentence for each rule that a request would break once it has its place."""
    if isinstance(prompt, str):
        if sentences := list(too_much_text(prompt, bounds, models.max_text_bytes)):
            return sentences
        prompt = await models.encoder.encode(prompt)
    if goes_without_drafting(request, bounds, models):
        request = replace(request, speculation=False)
    return broken(REQUEST_RULES, TokenizedRequest(request, prompt, models.target, models.draft))


async def _prompts(
    body: Body, models: Models, template: ChatTemplate | None, bounds: RequestBounds
) -> list[str | tuple[int, ...]]:
    if isinstance(body, CompletionBody):
        return body.prompts
    return [await chat_prompt(body, models, template, bounds)]


async def chat_prompt(
    body: ChatBody, models: Models, template: ChatTemplate | None, bounds: RequestBounds
) -> tuple[int, ...]:
    """The prompt that a chat makes.

    Raises:
        InvalidRequestError: there is no template, it does not take the messages, or the prompt is too large.
    """
    messages = [message.fields for message in body.messages]
    prompt = await text_of_chat(
        template,
        messages,
        models,
        bounds,
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
    )
    if body.continue_final_message and isinstance(content := messages[-1]["content"], str):
        prompt = open_ended(prompt, content)
    return await ids_of_chat(prompt, models, bounds)


def _request(body: Body, prompt: str | tuple[int, ...], choice: int) -> GenerationRequest:
    values = {name: value for name in body.shared if (value := getattr(body, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if "seed" in values:
        values["seed"] = _seed_of_choice(values["seed"], choice)
    return GenerationRequest(
        prompt,
        **values,
        max_tokens=body.effective_max_tokens,
        stop=body.stop_strings,
        ignore_eos=body.ignore_eos,
        speculation=body.speculation,
        logprobs=body.alternatives,
        logit_bias=body.biases,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        max_tokens_must_fit=body.sets_max_tokens,
    )


def _seed_of_choice(seed: int, choice: int) -> int:
    """The choices of one prompt have consecutive seeds from the request's own on, within 64 bits."""
    return (seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2 if choice else seed
