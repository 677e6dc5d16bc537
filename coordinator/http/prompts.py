"""From a body to the completions that it asks for."""

from __future__ import annotations

from coordinator.bounds import RequestBounds, too_much_text
from coordinator.http.chat_template import ChatTemplate
from coordinator.http.rules import HTTP_RULES, Body
from coordinator.http.schema import ChatBody, CompletionBody
from coordinator.plan import Models
from coordinator.rules import REQUEST_RULES, TokenizedRequest
from coordinator.tokenizer import encode
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
    requests = [
        _request(body, prompt, choice) for prompt in prompts for choice in range(max(1, body.choices))
    ]
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them.
        for request, prompt in zip(requests[:1], prompts[:1], strict=True):
            sentences += await _broken_later(request, prompt, models, bounds)
        raise InvalidRequestError("; ".join(sentences))
    return requests


async def _broken_later(
    request: GenerationRequest, prompt: str | tuple[int, ...], models: Models, bounds: RequestBounds
) -> list[str]:
    """A sentence for each rule that a request would break once it has its place."""
    if isinstance(prompt, str):
        if sentences := list(too_much_text(prompt, bounds)):
            return sentences
        prompt = await encode(models.tokenizer, prompt)
    return broken(REQUEST_RULES, TokenizedRequest(request, prompt, models.target, models.draft))


async def _prompts(
    body: Body, models: Models, template: ChatTemplate | None, bounds: RequestBounds
) -> list[str | tuple[int, ...]]:
    if isinstance(body, CompletionBody):
        return body.prompts
    return [await _chat_prompt(body, models, template, bounds)]


async def _chat_prompt(
    body: ChatBody, models: Models, template: ChatTemplate | None, bounds: RequestBounds
) -> tuple[int, ...]:
    if template is None:
        raise InvalidRequestError(
            f"the model {models.target.name} has no chat template; use /v1/completions, or start the coordinator "
            "with --chat-template FILE"
        )
    messages = [message.model_dump() for message in body.messages]
    prompt = template.prompt(
        messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
    )
    # The request's own check comes later and sees ids alone.
    if sentences := list(too_much_text(prompt, bounds)):
        raise InvalidRequestError("; ".join(sentences))
    # The template writes the special tokens itself.
    return await encode(models.tokenizer, prompt, add_special_tokens=False)


def _request(body: Body, prompt: str | tuple[int, ...], choice: int) -> GenerationRequest:
    values = {name: value for name in body.shared if (value := getattr(body, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if "seed" in values:
        values["seed"] = _seed_of_choice(values["seed"], choice)
    return GenerationRequest(
        prompt,
        **values,
        max_tokens=body.most_tokens,
        stop=body.stop_strings,
        ignore_eos=body.ignore_eos,
        speculation=body.speculation,
        logprobs=body.alternatives,
    )


def _seed_of_choice(seed: int, choice: int) -> int:
    """The choices of one prompt have seeds of their own, the first the one that was asked for; within 64 bits."""
    return (seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2 if choice else seed
