"""OpenAI's endpoints, and vLLM's, over the coordinator's completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.answers import Answer, ChatAnswer, CompletionAnswer, Reply, merged
from coordinator.http.bodies import ALONE_HEADER, BodyReader, HeldBytes, fit, ignored_header
from coordinator.http.chat import Chats
from coordinator.http.errors import ModelNotFoundError
from coordinator.http.responses import ResponseAnswer, chat_of
from coordinator.http.schema import (
    Body,
    Chat,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    Sampled,
    TokenizeBody,
)
from coordinator.http.tools import HARMONY
from coordinator.requests.admission import peer_of_host
from coordinator.requests.plan import Models, keep_out
from coordinator.requests.runner import RequestRunner
from coordinator.requests.validation import REQUEST_RULES, TokenizedRequest, outside_vocabulary
from coordinator.settings.coordinator import HttpOptions, RequestBounds
from tandem.config.rule import broken, refuse
from tandem.errors import InvalidRequestError
from tandem.serving.interceptors import RunningCalls
from tandem.types import GenerationRequest, Grammar

BodyT = TypeVar("BodyT", bound=Body)

Prompt = str | tuple[int, ...]

_OPTIONS = frozenset(field.name for field in fields(GenerationRequest))


class Api:
    """The endpoints below `/v1`, `/tokenize` and `/detokenize`."""

    def __init__(
        self, completions: RequestRunner, chats: Chats, calls: RunningCalls, options: HttpOptions
    ) -> None:
        self._completions = completions
        self._chats = chats
        self._calls = calls
        self._model_name = options.served_model_name
        self._reader = BodyReader(options)
        self._held = HeldBytes(
            options.http_max_held_answer_bytes,
            "large answers that are not streamed hold {max_bytes} bytes, which is the maximum; set stream, ask for "
            "fewer completions, tokens or logprobs, or try again",
        )
        self._created = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._model_name or self._completions.models.target.name

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body, headers = await self._body(request, CompletionBody)
        return await self._complete(request, body, CompletionAnswer, headers)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body, headers = await self._body(request, ChatBody)
        return await self._complete(request, body, ChatAnswer, headers)

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        body, headers = await self._body(request, ResponsesBody)
        refuse(body.refusals())
        return await self._complete(request, chat_of(body), partial(ResponseAnswer, body), headers)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body, headers = await self._body(request, TokenizeBody)
        refuse(body.refusals())
        models, bounds = self._completions.models, self._completions.bounds
        if body.prompt is None:
            token_ids = await _chat_prompt(body, models, self._chats, bounds)
        else:
            token_ids = await models.encode(body.prompt, bounds, add_special_tokens=body.add_special_tokens)
        answer = {
            "count": len(token_ids),
            "max_model_len": models.target.max_length,
            "tokens": token_ids,
            "token_strs": [*map(models.tokenizer.id_to_token, token_ids)] if body.return_token_strs else None,
        }
        return JSONResponse(answer, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body, headers = await self._body(request, DetokenizeBody)
        models = self._completions.models
        refuse(outside_vocabulary("tokens holds", body.tokens, models.target))
        # Tens of thousands of ids take long enough for others to notice.
        text = await asyncio.to_thread(models.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=headers)

    async def _body(self, request: Request, model: type[BodyT]) -> tuple[BodyT, dict[str, str]]:
        """The body, and the header that names what is ignored of it."""
        body, unknown = await self._reader.read(request, model, self._completions)
        self._check_model(body.model)
        return body, ignored_header(*unknown, *body.passed_over)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": self._completions.models.target.max_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.model_name):
            raise ModelNotFoundError(
                f"model is {name!r}; it must be {self.model_name!r}, which is served here"
            )

    async def _complete(
        self, request: Request, body: Sampled, form: Callable[..., Answer], headers: dict[str, str]
    ) -> Response:
        models, bounds = self._completions.models, self._completions.bounds
        requests = await requests_of(body, models, self._chats, bounds)
        # A client may use a name twice, so it is only a part of ours.
        named = request.state.client_request_id or body.request_id
        request_id = f"{fit(named)}-{uuid.uuid4().hex[:8]}" if named else uuid.uuid4().hex
        answer = form(request_id, self.model_name, models.tokenizer, body, len(requests))
        usage = body.stream_options
        if usage is not None and usage.include_usage and usage.continuous_usage_stats:
            ids = [await _ids(each.prompt, models, bounds) for each in requests]
            requests = [replace(each, prompt=prompt) for each, prompt in zip(requests, ids, strict=True)]
            answer.prompt_tokens = [*map(len, ids)]
        if isinstance(body, ChatBody):
            assert self._chats.template is not None, "it has made the prompt"
            is_bound, calls = requests[0].grammar is not None, self._chats.template.calls
            if body.may_call and body.tool_choice not in (None, "auto"):
                answer.read_calls("demanded")
            elif body.may_call or (calls == HARMONY and not is_bound):
                answer.read_calls(calls)
        traceparent = request.headers.get("traceparent", "")
        peer = "" if request.client is None else peer_of_host(request.client.host)
        # The first completion has the request's own name in logs and lists.
        names = [request_id, *(f"{request_id}-{index}" for index in range(1, len(requests)))]
        chunks = merged(
            [
                self._completions.complete(each, body.timeout_seconds, name, traceparent, peer)
                for each, name in zip(requests, names, strict=True)
            ]
        )
        if penalties := keep_out(requests[0], bounds, models):
            headers |= {ALONE_HEADER: ", ".join(penalties)}
        return Reply(answer, chunks, self._calls, self._held, headers, streams=bool(body.stream))


# ---- from a body to the completions that it asks for


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
            [await _chat_prompt(body, models, chats, bounds)] if isinstance(body, ChatBody) else body.prompts
        )
    except InvalidRequestError as error:
        raise InvalidRequestError("; ".join([*sentences, str(error)])) from None
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them. The first request stands for all: their number
        # may be what is wrong.
        refuse(
            sentences + await _broken_later(_request(body, prompts[0], 0, None), prompts[0], models, bounds)
        )
    grammar = body.grammar
    is_marked = isinstance(body, ChatBody) and chats.template is not None and chats.template.calls == HARMONY
    return [
        _request(body, prompt, choice, grammar, with_special_tokens=is_marked)
        for prompt in prompts
        for choice in range(body.choices)
    ]


async def _ids(prompt: Prompt, models: Models, bounds: RequestBounds) -> tuple[int, ...]:
    return await models.encode(prompt, bounds) if isinstance(prompt, str) else prompt


async def _broken_later(
    request: GenerationRequest, prompt: Prompt, models: Models, bounds: RequestBounds
) -> list[str]:
    """A sentence for each rule that a request would break once it has its place."""
    try:
        prompt = await _ids(prompt, models, bounds)
    except InvalidRequestError as error:
        return [str(error)]
    if keep_out(request, bounds, models):
        request = replace(request, speculation=False)
    return broken(REQUEST_RULES, TokenizedRequest(request, prompt, models.target, models.draft))


async def _chat_prompt(body: Chat, models: Models, chats: Chats, bounds: RequestBounds) -> tuple[int, ...]:
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


def _request(
    body: Sampled,
    prompt: Prompt,
    choice: int,
    grammar: Grammar | None,
    *,
    with_special_tokens: bool = False,
) -> GenerationRequest:
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
        "with_special_tokens": with_special_tokens or not body.skip_special_tokens,
        "grammar": grammar,
    }
    if body.top_k == -1:
        values["top_k"] = 0
    if body.seed is not None and choice:
        # The choices of one prompt have consecutive seeds from the request's own on, within 64 bits.
        values["seed"] = (body.seed + choice + 2**63) % 2**64 - 2**63
    return GenerationRequest(**values)
