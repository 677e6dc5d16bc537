"""Arrival of requests by gRPC: large ones take turns to be parsed, and a full queue refuses all of them unread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.requests.plan import Models
from coordinator.requests.runner import LARGE_BYTES, RequestRunner
from coordinator.requests.validation import check_counts
from coordinator.settings.coordinator import MAX_CHAT_MESSAGES, RequestBounds
from tandem.errors import InvalidRequestError
from tandem.serving.interceptors import Context, Handler, behaviour_of, remade, traceparent_of, unreadable

GENERATE = "/tandem.v1.GenerationService/Generate"
RENDER_CHAT = "/tandem.v1.GenerationService/RenderChat"

_MAX_ID_BYTES = 5
"""Bytes of a token id as a varint."""
_BIAS_BYTES = 16
"""Bytes of an entry of logit_bias: its tag and length, an id and a number, each with a tag."""
_MESSAGE_BYTES = 64
"""Bytes of a chat's message beside its content: its role, tags and lengths."""
_OTHER_BYTES = 4 << 10
"""Enough for all fields of fixed size, and for the tags and lengths of the others."""


@dataclass(frozen=True, slots=True)
class UnparsedRequest:
    """The bytes of a large request."""

    content: bytes
    read: Callable[[bytes], Any]
    is_chat: bool = False


def _unless_large(read: Any, content: bytes, *, is_chat: bool) -> Any:
    return UnparsedRequest(content, read, is_chat) if len(content) > LARGE_BYTES else read(content)


async def parsed(request: Any, completions: RequestRunner) -> Any:
    """The message of a request; of a large one, its size and its counts are checked."""
    if not isinstance(request, UnparsedRequest):
        return request
    models, bounds = completions.models, completions.bounds
    size = len(request.content)
    chat_limit = _max_text_bytes(models, bounds) + MAX_CHAT_MESSAGES * _MESSAGE_BYTES
    limit = chat_limit if request.is_chat else max_bytes(models, bounds)
    if size > limit:
        raise InvalidRequestError(f"the request has {size} bytes; it must be at most {limit}")
    try:
        async with completions.turns.turn():
            message = request.read(request.content)
    except DecodeError:
        raise unreadable() from None
    if not request.is_chat:
        # Before anything is built of them.
        check_counts(message, bounds, len(message.token_ids.token_ids), models.target.max_length)
    return message


def max_bytes(models: Models, bounds: RequestBounds) -> int:
    """Maximum bytes of a request within all bounds."""
    prompt = max(_max_text_bytes(models, bounds), _MAX_ID_BYTES * models.target.max_length)
    # A character has up to 4 bytes in UTF-8
    stop = bounds.max_stop_strings * (4 * bounds.max_stop_length + _MAX_ID_BYTES)
    biases = bounds.max_logit_biases * _BIAS_BYTES + bounds.max_stop_token_ids * _MAX_ID_BYTES
    return prompt + stop + biases + bounds.max_grammar_bytes + _OTHER_BYTES


def _max_text_bytes(models: Models, bounds: RequestBounds) -> int:
    limit = models.max_text_bytes
    return bounds.max_prompt_bytes if limit is None else min(bounds.max_prompt_bytes, limit)


def admitted(completions: RequestRunner, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
    """The call's own handler, which gets the bytes of a large request in place of its message; or a refusal.

    Under overload every refusal delays the next one. Reading a request that is then refused would take a third of the
    coordinator's time for it, so most are refused here. A few that arrive at the same moment still pass, and
    `Admission` refuses them. Large requests are left to `parsed`, which has them take turns.
    """

    # Not in this step itself: a caller without a token gets another error, and does not count as a request.
    async def refuse(_requests: Any, context: Context) -> None:
        completions.refuse(traceparent_of(context))

    if details.method not in (GENERATE, RENDER_CHAT):
        return handler
    if details.method == GENERATE and completions.admission.is_full:
        return remade(handler, refuse, at_once=True)
    read = partial(_unless_large, handler.request_deserializer, is_chat=details.method == RENDER_CHAT)
    return remade(handler, behaviour_of(handler), read)
