"""Reading a request's body: JSON, bounded, in good time, and of a known form."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from coordinator.http.bodies.held_bytes import Share
from coordinator.http.bodies.json_shape import JsonShape
from coordinator.http.bodies.unknown_fields import UnknownFields
from coordinator.http.errors import HttpError
from coordinator.requests.runner import LARGE_BYTES, Turns
from tandem.errors import CapacityError, InvalidRequestError, TandemError

BODY_SECONDS = 30.0
"""How long a client may take to send a body."""

_MAX_SENTENCES = 8

_MIN_VALUES, _OTHER_VALUES = 1 << 15, 1 << 12
_MAX_CONTAINERS = 1 << 13
"""Parsing a value takes up to 0.3 us; parsing an object or a field, and reporting its errors, up to 5 us."""
_MANY_VALUES, _MANY_CONTAINERS = 1 << 12, 1 << 8
"""Parsing as many takes a turn, however few bytes they are."""
_SHOWN_CHARACTERS = 80

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Largest size of a body, in bytes."""

    max_bytes: int
    most_values: int
    """Commas in its JSON."""
    most_containers: int
    """Brackets, braces and colons in its JSON."""

    @classmethod
    def of(cls, max_bytes: int, max_length: int, max_logit_biases: int) -> BodyBounds:
        """The bounds for requests with prompts of up to `max_length` token ids and so many biases."""
        most_values = max(_MIN_VALUES, max_length + _OTHER_VALUES) + max_logit_biases
        return cls(max_bytes, most_values, _MAX_CONTAINERS + max_logit_biases)


async def read_body(
    request: Request,
    model: type[ModelT],
    bounds: BodyBounds,
    turns: Turns,
    unknown: UnknownFields,
    share: Share,
) -> ModelT:
    """The body of a request.

    Args:
        request: The request.
        model: What its body must be.
        bounds: Of its size.
        turns: Large bodies take turns to be parsed.
        unknown: Reads it, and knows what to do with other fields.
        share: Counts its bytes for as long as they are held.

    Raises:
        CapacityError: too many bytes of bodies are held.
        HttpError: it is not JSON by its content type, too large, or too slow in coming.
        InvalidRequestError: it is no JSON, has too many values, or other fields or types than it should.
    """
    # A page of another origin can post a plain form here without the browser asking us first, but no JSON.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, f"content-type is {content_type or 'not set'}; it must be application/json")
    shape = JsonShape()
    content = await _read(request, bounds, shape, share)
    is_large = (
        len(content) > LARGE_BYTES or shape.values > _MANY_VALUES or shape.containers > _MANY_CONTAINERS
    )
    try:
        async with turns.turn() if is_large else nullcontext():
            body, request.state.ignored_fields = unknown.read(model, content)
            return body
    except ValidationError as error:
        raise InvalidRequestError("; ".join(_sentences(error))) from None


async def _read(request: Request, bounds: BodyBounds, shape: JsonShape, share: Share) -> bytes:
    parts: list[bytes] = []
    refusal: TandemError | None = None
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > bounds.max_bytes:
                    raise HttpError(
                        413,
                        f"the body is larger than {bounds.max_bytes} bytes, which is the most",
                        "body_too_large",
                    )
                if refusal is not None:
                    continue  # a client that still sends would not see the answer
                shape.feed(part)
                refusal = _refusal(part, bounds, shape, share)
                if refusal is None:
                    parts.append(part)
                else:
                    parts.clear()
                    share.clear()
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the body ended before it was complete") from None
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _refusal(part: bytes, bounds: BodyBounds, shape: JsonShape, share: Share) -> TandemError | None:
    """Why the body is not taken after this part; None where it is."""
    if excesses := list(shape.excesses(bounds.most_values, bounds.most_containers)):
        return HttpError(413, "; ".join(excesses), "body_too_large")
    try:
        share.add(len(part))
    except CapacityError as error:
        return error
    return None


def _sentences(error: ValidationError) -> list[str]:
    # For a field of several types, pydantic reports an error for each; the closest match says most.
    closest: dict[object, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        field = detail["loc"][:1]
        if field not in closest or len(detail["loc"]) > len(closest[field]["loc"]):
            closest[field] = detail
    details = list(closest.values())
    sentences = list(map(_sentence, details[:_MAX_SENTENCES]))
    if len(details) > _MAX_SENTENCES:
        sentences.append(f"and {len(details) - _MAX_SENTENCES} more are wrong")
    return sentences


def _sentence(detail: ErrorDetails) -> str:
    message, location = detail["msg"], [str(part) for part in detail["loc"]]
    words = f"{message[0].lower()}{message[1:]}"
    match detail["type"]:
        case "json_invalid":
            return f"the body cannot be read: {words}"
        case "extra_forbidden":
            return f"{'.'.join(location)} is not an option of this request"
        case "missing":
            return f"{'.'.join(location)} is missing"
    if not location:
        return f"the body is not an object: {words}"
    # Of a union, pydantic names the member that it tried last; the field itself says enough.
    name = ".".join(part for part in location if not part.endswith("]") and part not in ("str", "int"))
    return f"{name} is {_shown(detail['input'])}: {words}"


def _shown(value: object) -> str:
    if isinstance(value, str | list):
        value = value[:_SHOWN_CHARACTERS]  # its repr is cut all the same
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
