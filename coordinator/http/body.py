"""Reading a request's body: JSON, bounded, in good time, and of a known form."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from coordinator.http.errors import HttpError
from tandem.errors import InvalidRequestError

BODY_SECONDS = 30.0
"""How long a client may take to send a body."""

_MOST_SENTENCES = 8

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_body(request: Request, model: type[ModelT], most_bytes: int) -> ModelT:
    """The body of a request.

    Raises:
        HttpError: it is not JSON by its content type, too large, or too slow in coming.
        InvalidRequestError: it is no JSON, or has other fields or types than it should.
    """
    # A page of another origin can post a plain form here without the browser asking us first, but no JSON.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, f"content-type is {content_type or 'not set'}; it must be application/json")
    content = await _read(request, most_bytes)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise InvalidRequestError("; ".join(_sentences(error))) from None


async def _read(request: Request, most_bytes: int) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise HttpError(
                        413,
                        f"the body is larger than {most_bytes} bytes, which is the most",
                        "body_too_large",
                    )
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the body ended before it was complete") from None
    return b"".join(parts)


def _sentences(error: ValidationError) -> list[str]:
    # Of a field that may be several things, pydantic tells why it is none of them; the closest match says most.
    closest: dict[object, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        field = detail["loc"][:1]
        if field not in closest or len(detail["loc"]) > len(closest[field]["loc"]):
            closest[field] = detail
    details = list(closest.values())
    sentences = list(map(_sentence, details[:_MOST_SENTENCES]))
    if len(details) > _MOST_SENTENCES:
        sentences.append(f"and {len(details) - _MOST_SENTENCES} more are wrong")
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
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
