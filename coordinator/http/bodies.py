"""Bodies of requests: bounded, read in good time, and of a known form."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from coordinator.http.errors import HttpError
from coordinator.requests.runner import LARGE_BYTES, Turns
from coordinator.settings.coordinator import HttpOptions
from tandem.errors import CapacityError, InvalidRequestError, TandemError

FREE_BYTES = 64 << 10
"""Uncounted bytes of each connection, so that small requests and answers pass when large ones fill the rest."""
_RETRY_SECONDS = 1.0


class HeldBytes:
    """The bytes of one kind, such as request bodies, that are held at once over all connections."""

    def __init__(self, max_bytes: int, advice: str) -> None:
        """
        Args:
            max_bytes: Maximum bytes, besides the free ones of each connection.
            advice: The sentence of a refusal, with `{max_bytes}` for the maximum.
        """
        self._max_bytes = max_bytes
        self._advice = advice
        self.held = 0
        """Bytes that are held now, without the free ones."""

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One connection's part; it is given back at the end of the block."""
        share = Share(self)
        try:
            yield share
        finally:
            share.clear()

    def take(self, count: int) -> None:
        """Count more bytes, or fewer.

        Raises:
            CapacityError: there is no room for them. They are not counted.
        """
        if count > 0 and self.held + count > self._max_bytes:
            raise CapacityError(self._advice.format(max_bytes=self._max_bytes), _RETRY_SECONDS)
        self.held += count


class Share:
    """The bytes that one connection holds."""

    def __init__(self, of: HeldBytes) -> None:
        self._of = of
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            CapacityError: there is no room for them. All are given back at once: the request takes a while to end, and
                every other one that grows meanwhile would be refused as well.
        """
        more = max(self._bytes + count - FREE_BYTES, 0) - max(self._bytes - FREE_BYTES, 0)
        try:
            self._of.take(more)
        except CapacityError:
            self.clear()
            raise
        self._bytes += count

    def clear(self) -> None:
        """Give all of them back."""
        self._of.take(-max(self._bytes - FREE_BYTES, 0))
        self._bytes = 0


@dataclass(frozen=True, slots=True)
class HttpMemory:
    """Bounds of the HTTP side's memory."""

    max_body_bytes: int
    """Maximum size of one request's body."""
    bodies: HeldBytes
    """Bodies that are not read and parsed yet."""
    answers: HeldBytes
    """Answers that are not streamed, until they are sent."""

    @classmethod
    def of(cls, settings: HttpOptions) -> HttpMemory:
        """The bounds that the options set."""
        bodies = HeldBytes(
            settings.http_max_held_body_bytes,
            "large bodies that have not arrived completely hold {max_bytes} bytes, which is the maximum; try again",
        )
        answers = HeldBytes(
            settings.http_max_held_answer_bytes,
            "large answers that are not streamed hold {max_bytes} bytes, which is the maximum; set stream, ask for "
            "fewer completions, tokens or logprobs, or try again",
        )
        return cls(settings.http_max_body_bytes, bodies, answers)


_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_VALUE, _CONTAINER = 1, 2

_KINDS = np.zeros(256, np.uint8)
_KINDS[ord(",")] = _VALUE
_KINDS[[ord(mark) for mark in "{[:"]] = _CONTAINER


class JsonShape:
    """Counts the marks outside of strings that make a JSON text expensive to parse.

    The parts of a text are counted as they arrive, 64 KiB in about 0.4 ms, so that a text with too many values is
    refused before all of it has been read. Text that is no JSON is counted too; the parser refuses it later.
    """

    def __init__(self) -> None:
        self.values = 0
        """Commas: array elements and object fields, without the first of each."""
        self.containers = 0
        """Opening brackets, opening braces and colons: arrays, objects, and fields of objects."""
        self._in_string = False
        self._is_escaped = False

    def feed(self, part: bytes) -> None:
        """Count the next part of the text."""
        if not part:
            return
        characters = np.frombuffer(part, np.uint8)
        quotes = characters == _QUOTE
        if self._is_escaped or _BACKSLASH in part:
            runs = _backslashes_before(characters, carried=int(self._is_escaped))
            quotes &= runs[:-1] % 2 == 0
            self._is_escaped = bool(runs[-1] % 2)
        inside = np.cumsum(quotes, dtype=np.int32) + int(self._in_string)
        outside = inside % 2 == 0
        self._in_string = not outside[-1]
        counts = np.bincount(_KINDS[characters[outside]], minlength=3)
        self.values += int(counts[_VALUE])
        self.containers += int(counts[_CONTAINER])

    def excesses(self, most_values: int, most_containers: int) -> Iterator[str]:
        """A sentence for each bound that the text exceeds."""
        if self.values > most_values:
            yield f"the body has {self.values} values or more; it must have at most {most_values}"
        if self.containers > most_containers:
            yield (
                f"the body has {self.containers} lists, objects and fields or more; "
                f"it must have at most {most_containers}"
            )


def _backslashes_before(characters: npt.NDArray[np.uint8], carried: int) -> npt.NDArray[np.int64]:
    """Lengths of the runs of backslashes that end right before each character and at the end, shape (n + 1,).

    `carried` is 1 where the part before ended with an odd run, and 0 otherwise.
    """
    count = len(characters)
    indices = np.arange(count)
    last_other = np.maximum.accumulate(np.where(characters != _BACKSLASH, indices, -1))
    before = np.concatenate(([-1], last_other))
    lengths = np.arange(count + 1) - 1 - before
    return lengths + carried * (before < 0)


logger = logging.getLogger(__name__)

UnknownFieldsPolicy = Literal["refuse", "ignore"]

HEADER = "X-Tandem-Ignored"
"""Names the fields of a request that were passed over."""

_MAX_LOGGED = 256
"""Names that are remembered as logged: clients could make up any number of them."""

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")

ModelT = TypeVar("ModelT", bound=BaseModel)


class UnknownFields:
    """Reads bodies by one policy."""

    def __init__(self, policy: UnknownFieldsPolicy = "refuse") -> None:
        self._ignores = policy == "ignore"
        self._logged: set[str] = set()

    def read(self, model: type[ModelT], content: bytes) -> tuple[ModelT, tuple[str, ...]]:
        """The body, and the names of its ignored fields.

        Raises:
            ValidationError: it is not valid JSON, or has an error other than an unknown field that may be ignored.
        """
        try:
            return model.model_validate_json(content), ()
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
            if not self._ignores or len(unknown) < len(details):
                raise
        values = json.loads(content)
        for location in unknown:
            _leave_out(values, location)
        names = tuple(".".join(map(str, location)) for location in unknown)
        self._log(names)
        return model.model_validate_json(json.dumps(values)), names

    def _log(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                logger.warning("an unknown field is ignored", extra={"field": name[:200]})


def ignored_header(*names: Iterable[str]) -> dict[str, str]:
    """The header with the names of ignored fields; none without any."""
    # Names come from clients: characters that are invalid in a header are left out.
    listed = [_UNFIT.sub("?", name)[:80] for group in names for name in group]
    return {HEADER: ", ".join(listed[:16])} if listed else {}


def _leave_out(values: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        values = values[part]
    del values[location[-1]]


BODY_SECONDS = 30.0
"""How long a client may take to send a body."""

_MAX_SENTENCES = 8

_MIN_VALUES, _OTHER_VALUES = 1 << 15, 1 << 12
_MAX_CONTAINERS = 1 << 13
"""Parsing a value takes up to 0.3 us; parsing an object or a field, and reporting its errors, up to 5 us."""
_MANY_VALUES, _MANY_CONTAINERS = 1 << 12, 1 << 8
"""Parsing as many takes a turn, however few bytes they are."""
_SHOWN_CHARACTERS = 80


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
