"""OpenAI's endpoints over the coordinator's completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.answers import Answer, ChatAnswer, CompletionAnswer
from coordinator.http.bodies import BodyBounds, HttpMemory, Share, UnknownFields, ignored_header, read_body
from coordinator.http.chat import ChatTemplate, ids_of_chat, text_of_chat
from coordinator.http.errors import ModelNotFoundError
from coordinator.http.schema import HTTP_RULES, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from coordinator.http.sending import EventStream, WholeAnswer, merged
from coordinator.requests.admission import peer_of_host
from coordinator.requests.plan import Models, goes_without_drafting
from coordinator.requests.runner import Turns
from coordinator.requests.validation import REQUEST_RULES, TokenizedRequest, too_much_text
from coordinator.settings.coordinator import RequestBounds
from tandem.config.rule import broken
from tandem.errors import InvalidRequestError
from tandem.serving.interceptors import RunningCalls
from tandem.types import Chunk, GenerationRequest


def open_ended(prompt: str, final_text: str) -> str:
    """The prompt up to the end of the final message's text, without the rest of the template's output.

    Meaning and name (`continue_final_message`) are those of transformers' `apply_chat_template`.

    Args:
        prompt: The rendered chat, without a generation prompt.
        final_text: The text of its last message.

    Raises:
        InvalidRequestError: the template changes the message.
    """
    stripped = final_text.strip()
    start = prompt.rfind(stripped)
    if start < 0 or not stripped:
        raise InvalidRequestError(
            "continue_final_message is true and the chat template does not write the last message's text; it must "
            "be false for such a chat"
        )
    # A template may strip the message; where it does not, trailing white space belongs to it.
    written = final_text.lstrip()
    end = start + len(written) if prompt.startswith(written, start) else start + len(stripped)
    return prompt[:end]


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


ModelT = TypeVar("ModelT", bound=BaseModel)


class Completing(Protocol):
    """Runs completions, as for the gRPC servicer."""

    def complete(
        self,
        request: GenerationRequest,
        deadline_seconds: float | None = None,
        request_id: str | None = None,
        traceparent: str = "",
        peer: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion."""


class Backend(Protocol):
    """Backend of the endpoints."""

    @property
    def completions(self) -> Completing:
        """Completes requests."""

    @property
    def models(self) -> Models:
        """The models that complete them."""

    @property
    def bounds(self) -> RequestBounds:
        """Bounds of a request."""

    @property
    def turns(self) -> Turns:
        """Large bodies take turns to be parsed."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Makes a prompt of a chat; None when the model has no template."""


class OpenAIApi:
    """`/v1/...`."""

    def __init__(
        self,
        backend: Backend,
        calls: RunningCalls,
        model_name: str | None,
        memory: HttpMemory,
        unknown_fields: UnknownFields,
    ) -> None:
        """Over this backend; the model is served under `model_name`, or under its own."""
        self.backend = backend
        self._unknown_fields = unknown_fields
        self.calls = calls
        self._model_name = model_name
        self._memory = memory
        self._created = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._model_name or self.backend.models.target.name

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._complete(request, await self.body(request, CompletionBody), CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._complete(request, await self.body(request, ChatBody), ChatAnswer)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def body(self, request: Request, model: type[ModelT]) -> ModelT:
        """The body of a request. `request.state.ignored_fields` has the names of ignored fields.

        Raises:
            HttpError: its content type is not JSON, or it is too large or too slow.
            CapacityError: too many bytes of bodies are held.
            InvalidRequestError: it is not valid JSON, or not valid for the model class.
        """
        backend = self.backend
        bounds = BodyBounds.of(
            self._memory.max_body_bytes, backend.models.target.max_length, backend.bounds.max_logit_biases
        )
        with self._memory.bodies.share() as share:
            return await read_body(request, model, bounds, backend.turns, self._unknown_fields, share)

    def _model(self) -> dict[str, Any]:
        target = self.backend.models.target
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": target.max_length,
        }

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ModelNotFoundError: it names one.
        """
        if name not in (None, "", self.model_name):
            raise ModelNotFoundError(
                f"model is {name!r}; it must be {self.model_name!r}, which is served here"
            )

    async def _complete(self, request: Request, body: Body, form: type[Answer]) -> Response:
        self.check_model(body.model)
        answer, chunks = await self.begin(request, body, form)
        headers = ignored_header(request.state.ignored_fields, body.passed_over)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(_events(answer, chunks, with_usage=with_usage), self.calls, headers)
        return self.whole(answer, chunks, answer.whole, headers)

    async def begin(
        self, request: Request, body: Body, form: type[Answer]
    ) -> tuple[Answer, AsyncGenerator[tuple[int, Chunk]]]:
        """The answer to a body, still empty, and the pieces that it will gather.

        Raises:
            InvalidRequestError: with a sentence for each rule that the body breaks.
        """
        models = self.backend.models
        requests = await requests_of(body, models, self.backend.chat_template, self.backend.bounds)
        request_id = uuid.uuid4().hex
        answer = form(
            request_id,
            self.model_name,
            models.tokenizer,
            len(requests),
            body.choices,
            with_ids=body.return_token_ids,
        )
        chunks = self._chunks(
            requests,
            body.timeout_seconds,
            request_id,
            request.headers.get("traceparent", ""),
            "" if request.client is None else peer_of_host(request.client.host),
        )
        return answer, chunks

    def whole(
        self,
        answer: Answer,
        chunks: AsyncGenerator[tuple[int, Chunk]],
        make_body: Callable[[], dict[str, Any]],
        headers: Mapping[str, str],
    ) -> Response:
        """Collect all chunks, unless the client leaves first, and build the answer."""

        async def gather(share: Share) -> None:
            async with self.calls.running(), aclosing(chunks):
                async for index, chunk in chunks:
                    share.add(answer.keep(index, chunk))

        return WholeAnswer(gather, make_body, self._memory.answers, headers)

    def _chunks(
        self,
        requests: list[GenerationRequest],
        timeout_seconds: float | None,
        request_id: str,
        traceparent: str,
        peer: str,
    ) -> AsyncGenerator[tuple[int, Chunk]]:
        """The pieces of all completions of a request. The first has the request's own name in logs and lists."""
        return merged(
            [
                self.backend.completions.complete(
                    request,
                    timeout_seconds,
                    f"{request_id}-{index}" if index else request_id,
                    traceparent,
                    peer,
                )
                for index, request in enumerate(requests)
            ]
        )


async def _events(
    answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk]], *, with_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(chunks):
        async for index, chunk in chunks:
            answer.add(index, chunk)
            if (piece := answer.piece(index, chunk)) is not None:
                yield piece
    if with_usage:
        yield answer.last_piece()


class Tokenization:
    """The target's tokenizer over HTTP."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._api.body(request, TokenizeBody)
        self._api.check_model(body.model)
        models = self._api.backend.models
        token_ids = await self._token_ids(body)
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
        body = await self._api.body(request, DetokenizeBody)
        self._api.check_model(body.model)
        models = self._api.backend.models
        size = models.target.vocabulary_size
        unknown = next((token_id for token_id in body.tokens if not 0 <= token_id < size), None)
        if unknown is not None:
            raise InvalidRequestError(f"tokens holds token id {unknown}; ids must be in 0..{size - 1}")
        # Tens of thousands of ids take long enough for others to notice.
        text = await asyncio.to_thread(models.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=ignored_header(request.state.ignored_fields))

    async def _token_ids(self, body: TokenizeBody) -> tuple[int, ...]:
        backend = self._api.backend
        models, bounds = backend.models, backend.bounds
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt and messages are both set, or neither is; give one of them")
        if body.messages is not None:
            chat = ChatBody(
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            return await chat_prompt(chat, models, backend.chat_template, bounds)
        assert body.prompt is not None
        if sentences := list(too_much_text(body.prompt, bounds, models.max_text_bytes)):
            raise InvalidRequestError("; ".join(sentences))
        return await models.encoder.encode(body.prompt, add_special_tokens=body.add_special_tokens)
