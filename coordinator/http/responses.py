"""OpenAI's Responses API for plain text, whole or streamed, over the same completions as chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.answers import Answer, ChatAnswer
from coordinator.http.api import OpenAIApi
from coordinator.http.bodies import ignored_header
from coordinator.http.errors import error_object
from coordinator.http.schema import ChatBody, Message, ResponsesBody
from coordinator.http.sending import EventStream, data_line
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Chunk, FinishReason

_TEXT_PARTS = ("input_text", "output_text", "text")


class Responses:
    """`/v1/responses`."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def create(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        body = await self._api.body(request, ResponsesBody)
        self._api.check_model(body.model)
        if sentences := list(_unavailable(body)):
            raise InvalidRequestError("; ".join(sentences))
        answer, chunks = await self._api.begin(request, _chat(body), ChatAnswer)
        described = _ResponseObject(body, self._api.model_name)
        headers = ignored_header(request.state.ignored_fields, ("tools",) if body.tools else ())
        if body.stream:
            return _ResponseStream(_events(described, answer, chunks), self._api.calls, headers)
        return self._api.whole(answer, chunks, lambda: described.ended(answer), headers)


class _ResponseStream(EventStream):
    """Events have names, and the last of them ends the stream."""

    last = b""

    def event(self, content: dict[str, Any]) -> bytes:
        return f"event: {content['type']}\n".encode() + data_line(content)

    def failure(self, error: TandemError) -> bytes:
        described = error_object(error)["error"]
        return self.event(
            {"type": "error", **{name: described[name] for name in ("code", "message", "param")}}
        )


def _unavailable(body: ResponsesBody) -> Iterator[str]:
    kind = (body.text or {}).get("format", {"type": "text"}).get("type")
    if kind != "text":
        yield f"text.format is {kind}; it must be text: this coordinator does not constrain what is written"
    if body.tools and body.tool_choice != "none":
        yield "tools is set; it must be empty, or tool_choice none: this coordinator does not write tool calls"
    if body.previous_response_id is not None:
        yield "previous_response_id is set; it must be left out: this coordinator does not keep responses"
    if body.truncation not in (None, "disabled"):
        yield f"truncation is {body.truncation}; it must be disabled: this coordinator does not shorten prompts"
    if body.background:
        yield "background is true; it must be false: this coordinator does not keep responses"
    if body.include:
        yield "include is set; it must be empty: no further output exists"
    if body.reasoning and any(value is not None for value in body.reasoning.values()):
        yield "reasoning is set; it must be left out: the answer is not split into reasoning and text"


def _chat(body: ResponsesBody) -> ChatBody:
    """The chat that a response answers."""
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        for index, item in enumerate(body.input):
            if item.type != "message":
                raise InvalidRequestError(f"input.{index}.type is {item.type}; it must be message")
            messages.append(Message(role=item.role, content=_text(index, item.content)))
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
    )


def _text(index: int, content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"input.{index}.content is of type {part.get('type')}; it must be input_text or output_text"
            )
    return "\n".join(part["text"] for part in content)


class _ResponseObject:
    """The response as an object, at its beginning and at its end."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._body = body
        self._model = model
        self._id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())

    def response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The response in that state."""
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message that is the response's output."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def ended(self, answer: Answer) -> dict[str, Any]:
        """The whole response."""
        (choice,) = answer.choices
        summary, account = choice.summary, answer.account()
        is_cut = summary is not None and summary.finish_reason is FinishReason.LENGTH
        status, usage = "incomplete" if is_cut else "completed", account["usage"]
        return self.response(
            status,
            [self.item(status, [text_part(choice.text)])],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            speculation=account["speculation"],
        )


def text_part(text: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _events(
    described: _ResponseObject, answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk]]
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a response, numbered in order."""
    number = 0
    async with aclosing(_unnumbered(described, answer, chunks)) as events:
        async for event in events:
            yield {**event, "sequence_number": number}
            number += 1


async def _unnumbered(
    described: _ResponseObject, answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk]]
) -> AsyncGenerator[dict[str, Any]]:
    place = {"item_id": described.item_id, "output_index": 0, "content_index": 0}
    has_begun = False
    async with aclosing(chunks):
        async for index, chunk in chunks:
            answer.add(index, chunk)
            if not has_begun:
                has_begun = True
                for kind in ("response.created", "response.in_progress"):
                    yield {"type": kind, "response": described.response("in_progress", [])}
                item = described.item("in_progress", [])
                yield {"type": "response.output_item.added", "output_index": 0, "item": item}
                yield {"type": "response.content_part.added", **place, "part": text_part("")}
            if chunk.text:
                yield {"type": "response.output_text.delta", **place, "delta": chunk.text, "logprobs": []}
    response = described.ended(answer)
    text = answer.choices[0].text
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": text_part(text)}
    yield {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]}
    yield {"type": f"response.{response['status']}", "response": response}
