"""The form of OpenAI's Responses API, for plain text: a chat answered, whole or streamed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from coordinator.http.answers import ChatAnswer, data_line
from coordinator.http.chat import as_one_text
from coordinator.http.errors import error_object
from coordinator.http.schema import ChatBody, Message, ResponsesBody
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Chunk, FinishReason


def chat_of(body: ResponsesBody) -> ChatBody:
    """The chat that a response answers."""
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        for index, item in enumerate(body.input):
            if item.type != "message":
                raise InvalidRequestError(f"input.{index}.type is {item.type}; it must be message")
            content = as_one_text(f"input.{index}", item.content, ("input_text", "output_text", "text"))
            messages.append(Message(role=item.role, content=content))
    text_form = (body.text or {}).get("format")
    if isinstance(text_form, dict) and text_form.get("type") == "json_schema":
        text_form = {"type": "json_schema", "json_schema": {"schema": text_form.get("schema")}}
    return ChatBody(
        messages=messages,
        response_format=text_form,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
    )


class ResponseAnswer(ChatAnswer):
    """An answer of `/v1/responses`."""

    def __init__(self, body: ResponsesBody, *args: Any) -> None:
        super().__init__(*args)
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": self._head["created"],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self) -> dict[str, Any]:
        """The response at its end."""
        (choice,) = self.choices
        summary, account = choice.summary, self.account()
        is_cut = summary is not None and summary.finish_reason is FinishReason.LENGTH
        status, usage = "incomplete" if is_cut else "completed", account["usage"]
        return {
            **self._head,
            "status": status,
            "output": [self._item(status, _text_part(choice.said.content))],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "speculation": account["speculation"],
        }

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk]]) -> AsyncGenerator[bytes]:
        """The events of a response, numbered in order."""
        numbers = count()

        def event(kind: str, **content: Any) -> bytes:
            return _event({"type": f"response.{kind}", **content, "sequence_number": next(numbers)})

        place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        has_begun = False
        async with aclosing(chunks):
            async for index, chunk in chunks:
                said = self.add(index, chunk)
                if not has_begun:
                    has_begun = True
                    begun = {**self._head, "status": "in_progress", "output": []}
                    yield event("created", response=begun)
                    yield event("in_progress", response=begun)
                    yield event("output_item.added", output_index=0, item=self._item("in_progress"))
                    yield event("content_part.added", **place, part=_text_part(""))
                if said.content:
                    yield event("output_text.delta", **place, delta=said.content, logprobs=[])
        response = self.whole()
        (item,) = response["output"]
        (part,) = item["content"]
        yield event("output_text.done", **place, text=part["text"], logprobs=[])
        yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=0, item=item)
        yield event(response["status"], response=response)

    def failure(self, error: TandemError) -> bytes:
        described = error_object(error)["error"]
        return _event({"type": "error", **{name: described[name] for name in ("code", "message", "param")}})

    def _item(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(content),
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\n".encode() + data_line(content)
