"""OpenAI's endpoints over the coordinator's completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.bounds import RequestBounds
from coordinator.http.answers import Answer, ChatAnswer, CompletionAnswer
from coordinator.http.body import read_body
from coordinator.http.chat_template import ChatTemplate
from coordinator.http.errors import ModelNotFoundError
from coordinator.http.prompts import requests_of
from coordinator.http.rules import Body
from coordinator.http.schema import ChatBody, CompletionBody
from coordinator.http.streaming import EventStream
from coordinator.http.tasks import ClientGoneError, merged, while_connected
from coordinator.plan import Models
from tandem.serving.calls import RunningCalls
from tandem.types import Chunk, GenerationRequest


class Completing(Protocol):
    """The way in to completions, as the gRPC servicer has it."""

    def complete(
        self,
        request: GenerationRequest,
        deadline_seconds: float | None = None,
        request_id: str | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion."""


class Backend(Protocol):
    """What the endpoints stand on."""

    @property
    def completions(self) -> Completing:
        """Completes requests."""

    @property
    def models(self) -> Models:
        """What completes them."""

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask for at most."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Makes a prompt of a chat; None when the model has no template."""


class OpenAIApi:
    """`/v1/...`."""

    def __init__(
        self, backend: Backend, calls: RunningCalls, model_name: str | None, most_body_bytes: int
    ) -> None:
        """Over this backend; the model is served under `model_name`, or under its own."""
        self._backend = backend
        self._calls = calls
        self._model_name = model_name
        self._most_body_bytes = most_body_bytes
        self._created = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._model_name or self._backend.models.target.name

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = await read_body(request, CompletionBody, self._most_body_bytes)
        return await self._complete(request, body, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await read_body(request, ChatBody, self._most_body_bytes)
        return await self._complete(request, body, ChatAnswer)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        target = self._backend.models.target
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": target.max_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.model_name):
            raise ModelNotFoundError(
                f"model is {name!r}; it must be {self.model_name!r}, which is served here"
            )

    async def _complete(self, request: Request, body: Body, form: type[Answer]) -> Response:
        self._check_model(body.model)
        models = self._backend.models
        requests = await requests_of(body, models, self._backend.chat_template, self._backend.bounds)
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
            requests, body.timeout_seconds, request_id, request.headers.get("traceparent", "")
        )
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(_events(answer, chunks, with_usage=with_usage), self._calls)
        try:
            await while_connected(request.receive, self._gather(answer, chunks))
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(answer.whole())

    async def _gather(self, answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk]]) -> None:
        async with self._calls.running(), aclosing(chunks):
            async for index, chunk in chunks:
                answer.add(index, chunk)

    def _chunks(
        self,
        requests: list[GenerationRequest],
        timeout_seconds: float | None,
        request_id: str,
        traceparent: str,
    ) -> AsyncGenerator[tuple[int, Chunk]]:
        """The pieces of all completions of a request. The first has the request's own name in logs and lists."""
        return merged(
            [
                self._backend.completions.complete(
                    request, timeout_seconds, f"{request_id}-{index}" if index else request_id, traceparent
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
