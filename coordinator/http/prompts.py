"""From a body to the completions that it asks for."""

from __future__ import annotations

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


async def requests_of(body: Body, models: Models, template: ChatTemplate | None) -> list[GenerationRequest]:
    """A request for each completion: those of the first prompt, then those of the second.

    Raises:
        InvalidRequestError: with a sentence for each rule that the body breaks.
    """
    sentences = broken(HTTP_RULES, body)
    try:
        prompts = await _prompts(body, models, template)
    except InvalidRequestError as error:
        raise InvalidRequestError("; ".join([*sentences, str(error)])) from None
    requests = [
        _request(body, prompt, choice) for prompt in prompts for choice in range(max(1, body.choices))
    ]
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them.
        for request, prompt in zip(requests[:1], prompts[:1], strict=True):
            ids = await encode(models.tokenizer, prompt) if isinstance(prompt, str) else prompt
            sentences += broken(REQUEST_RULES, TokenizedRequest(request, ids, models.target, models.draft))
        raise InvalidRequestError("; ".join(sentences))
    return requests


async def _prompts(body: Body, models: Models, template: ChatTemplate | None) -> list[str | tuple[int, ...]]:
    if isinstance(body, CompletionBody):
        return body.prompts
    return [await _chat_prompt(body, models, template)]


async def _chat_prompt(body: ChatBody, models: Models, template: ChatTemplate | None) -> tuple[int, ...]:
    if template is None:
        raise InvalidRequestError(
            f"the model {models.target.name} has no chat template; use /v1/completions, or start the coordinator "
            "with --chat-template FILE"
        )
    messages = [message.model_dump() for message in body.messages]
    prompt = template.prompt(
        messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
    )
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
