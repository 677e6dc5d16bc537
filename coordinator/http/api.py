"""OpenAI's endpoints, and vLLM's, over the coordinator's completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.answers import Answer, ChatAnswer, CompletionAnswer
from coordinator.http.bodies import ALONE_HEADER, BodyReader, HeldBytes, fit, ignored_header
from coordinator.http.chat import Chats
from coordinator.http.errors import ModelNotFoundError
from coordinator.http.responses import ResponseObject, chat_of, failure, response_events
from coordinator.http.schema import (
    Body,
    Chat,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    Sampled,
    StreamOptions,
    TokenizeBody,
)
from coordinator.http.sending import DONE, EventStream, WholeAnswer, data_line, merged
from coordinator.http.tools import HARMONY, CallReader
from coordinator.requests.admission import peer_of_host
from coordinator.requests.plan import Models, keep_out
from coordinator.requests.runner import RequestRunner
from coordinator.requests.validation import REQUEST_RULES, TokenizedRequest, outside_vocabulary
from coordinator.settings.coordinator import HttpOptions, RequestBounds
from tandem.config.rule import broken, refuse
from tandem.errors import InvalidRequestError
from tandem.serving.interceptors import RunningCalls
from tandem.types import Chunk, GenerationRequest, Grammar

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
        return await self._complete(request, CompletionBody, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._complete(request, ChatBody, ChatAnswer)

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        body = await self._body(request, ResponsesBody)
        refuse(body.refusals())
        answer, chunks, headers = await self._begin(request, chat_of(body), ChatAnswer)
        if self._chats.template is not None and self._chats.template.calls == HARMONY:
            chunks = _texts_of(chunks)
        described = ResponseObject(body, self.model_name)
        headers |= ignored_header(request.state.ignored_fields, body.passed_over)
        if body.stream:
            return EventStream(response_events(described, answer, chunks), self._calls, headers, failure)
        ended = partial(described.ended, answer)
        return WholeAnswer(answer, chunks, ended, self._calls, self._held, headers)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._body(request, TokenizeBody)
        refuse(body.refusals())
        models, bounds = self._completions.models, self._completions.bounds
        if body.prompt is None:
            token_ids = await _chat_prompt(body, models, self._chats, bounds)
        else:
            token_ids = await models.encode(body.prompt, bounds, add_special_tokens=body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": models.target.max_length,
            "tokens": list(token_ids),
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [models.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return JSONResponse(answer, headers=ignored_header(request.state.ignored_fields))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = await self._body(request, DetokenizeBody)
        models = self._completions.models
        refuse(outside_vocabulary("tokens holds", body.tokens, models.target))
        # Tens of thousands of ids take long enough for others to notice.
        text = await asyncio.to_thread(models.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=ignored_header(request.state.ignored_fields))

    async def _body(self, request: Request, model: type[BodyT]) -> BodyT:
        completions = self._completions
        max_length, biases = completions.models.target.max_length, completions.bounds.max_logit_biases
        body = await self._reader.read(request, model, completions.turns, max_length, biases)
        self._check_model(body.model)
        return body

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

    async def _complete(self, request: Request, model: type[Sampled], form: type[Answer]) -> Response:
        body = await self._body(request, model)
        answer, chunks, headers = await self._begin(request, body, form)
        headers |= ignored_header(request.state.ignored_fields, body.passed_over)
        if body.stream:
            return EventStream(_events(answer, chunks, body.stream_options), self._calls, headers)
        return WholeAnswer(answer, chunks, answer.whole, self._calls, self._held, headers)

    async def _begin(
        self, request: Request, body: Sampled, form: type[Answer]
    ) -> tuple[Answer, AsyncGenerator[tuple[int, Chunk]], dict[str, str]]:
        """The answer to a body, still empty, the chunks that it will gather, and what its headers say of them."""
        models = self._completions.models
        bounds = self._completions.bounds
        requests = await requests_of(body, models, self._chats, bounds)
        # A client may use a name twice, so it is only a part of ours.
        named = request.state.client_request_id or body.request_id
        request_id = f"{fit(named)}-{uuid.uuid4().hex[:8]}" if named else uuid.uuid4().hex
        with_ids = body.return_token_ids
        answer = form(
            request_id, self.model_name, models.tokenizer, len(requests), body.choices, with_ids=with_ids
        )
        usage = body.stream_options
        if usage is not None and usage.include_usage and usage.continuous_usage_stats:
            ids = [await _ids(each.prompt, models, bounds) for each in requests]
            requests = [replace(each, prompt=prompt) for each, prompt in zip(requests, ids, strict=True)]
            answer.prompt_tokens = [*map(len, ids)]
        if isinstance(answer, ChatAnswer) and isinstance(body, ChatBody):
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
        penalties = keep_out(requests[0], self._completions.bounds, models)
        return answer, chunks, {ALONE_HEADER: ", ".join(penalties)} if penalties else {}


async def _events(
    answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk]], options: StreamOptions | None
) -> AsyncGenerator[bytes]:
    async with aclosing(chunks):
        async for index, chunk in chunks:
            answer.add(index, chunk)
            if (piece := answer.piece(index, chunk)) is not None:
                yield data_line(piece)
    if options is not None and options.include_usage:
        yield data_line(answer.last_piece())
    yield DONE


async def _texts_of(
    chunks: AsyncGenerator[tuple[int, Chunk]],
) -> AsyncGenerator[tuple[int, Chunk]]:
    """The chunks of one completion, without what is reasoning or a call in it."""
    reader = CallReader(HARMONY)
    async with aclosing(chunks):
        async for index, chunk in chunks:
            text, _ = reader.read(chunk.text)
            yield index, replace(chunk, text=text + (reader.finish() if chunk.summary else ""))


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
