"""OpenAI's endpoints over the coordinator's completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.bodies.held_bytes import HttpMemory, Share
from coordinator.http.bodies.reading import BodyBounds, read_body
from coordinator.http.bodies.unknown_fields import UnknownFields, ignored_header
from coordinator.http.chat.template import ChatTemplate
from coordinator.http.errors import ModelNotFoundError
from coordinator.http.openai.answers import Answer, ChatAnswer, CompletionAnswer
from coordinator.http.openai.prompts import requests_of
from coordinator.http.openai.rules import Body
from coordinator.http.openai.schema import ChatBody, CompletionBody
from coordinator.http.openai.streaming import EventStream
from coordinator.http.openai.whole import WholeAnswer
from coordinator.http.tasks import merged
from coordinator.requests.admission import peer_of_host
from coordinator.requests.plan import Models
from coordinator.requests.runner import Turns
from coordinator.settings.coordinator import RequestBounds
from tandem.serving.interceptors import RunningCalls
from tandem.types import Chunk, GenerationRequest

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
