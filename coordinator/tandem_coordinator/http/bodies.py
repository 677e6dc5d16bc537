"""Bodies of requests: bounded, read in good time, and of a known form."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from tandem.config.rule import refuse
from tandem.errors import CapacityError, InvalidRequestError, TandemError
from tandem_coordinator.http.errors import SHOWN_CHARACTERS, HttpError, shown
from tandem_coordinator.http.schema import Body
from tandem_coordinator.requests.admission import LARGE_BYTES, RETRY_SECONDS
from tandem_coordinator.requests.runner import RequestRunner
from tandem_coordinator.settings.coordinator import HttpOptions

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=Body)

BODY_SECONDS = 30.0
"""Time for a client to send a body; docs/security.md promises it."""

_MIN_VALUES = 1 << 15
_OTHER_VALUES = 1 << 12
_MAX_CONTAINERS = 1 << 13
"""Parsing a value takes up to 0.3 us; parsing an object or a field, and reporting its errors, up to 5 us. So a body at
its bounds takes some 50 ms."""
_MANY_VALUES = 1 << 12
_MANY_CONTAINERS = 1 << 8
"""Parsing more takes as long as parsing `LARGE_BYTES`, and so takes a turn."""

_FREE_BYTES = 64 << 10
"""Uncounted bytes of each connection, so that small requests and answers pass when large ones fill the rest."""

_MAX_SENTENCES = 8
"""Errors of a body that are described; a body of garbage has as many as it has values."""


@dataclass(slots=True)
class HeldBytes:
    """The bytes of one kind, such as request bodies, that all connections hold together."""

    max_bytes: int
    """Maximum bytes, besides the free ones of each connection."""
    advice: str
    """The sentence of a refusal, with `{max_bytes}` for the maximum."""
    held: int = 0
    """Bytes that are held now, without the free ones."""


class Share:
    """The bytes that one connection holds, until it is closed."""

    def __init__(self, of: HeldBytes) -> None:
        self._of = of
        self._bytes = self._counted = 0

    def add(self, count: int) -> None:
        """Count more bytes. When there is no room for them all are given back at once: the request takes a while to
        end, and every other one that grows meanwhile would be refused as well."""
        self._bytes += count
        counted = max(self._bytes - _FREE_BYTES, 0)
        of = self._of
        more = counted - self._counted
        if more > 0 and of.held + more > of.max_bytes:
            self.close()
            raise CapacityError(of.advice.format(max_bytes=of.max_bytes), RETRY_SECONDS)
        of.held += more
        self._counted = counted

    def close(self) -> None:
        self._of.held -= self._counted
        self._bytes = self._counted = 0


@dataclass(slots=True)
class JsonShape:
    """Counts what makes a JSON text expensive to parse, as its parts arrive, before a parser builds anything. A part of
    64 KiB takes at most 2 ms. Text that is no JSON is counted too; the parser refuses it later."""

    max_values: int
    max_containers: int
    values: int = 0
    """Commas outside of strings: array elements and object fields, without the first of each."""
    containers: int = 0
    """Opening brackets, opening braces and colons outside of strings: arrays, objects, and fields of objects."""
    _in_string: bool = False
    _rest: bytes = b""

    def feed(self, part: bytes) -> None:
        """Count a part; refuse the text once it exceeds a bound."""
        # Pairs first, from the left, as a parser reads them; then a backslash before a quote escapes it.
        text = (self._rest + part).replace(b"\\\\", b"")
        self._rest = b"\\" if text.endswith(b"\\") else b""
        pieces = text.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b" ".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self.values += outside.count(b",")
        self.containers += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        counts = (
            (self.values, self.max_values, "values"),
            (self.containers, self.max_containers, "lists, objects and fields"),
        )
        sentence = "the body has {} {} or more; it must have at most {}"
        if excesses := [sentence.format(count, what, most) for count, most, what in counts if count > most]:
            raise HttpError(413, "; ".join(excesses), "body_too_large")


class BodyReader:
    """Reads all bodies of the HTTP side, within its bounds."""

    def __init__(self, options: HttpOptions) -> None:
        self._max_bytes = options.http_max_body_bytes
        self._is_strict = options.strict_requests
        self._logged: set[str] = set()
        self._held = HeldBytes(
            options.http_max_held_body_bytes,
            "large bodies that have not arrived completely hold {max_bytes} bytes, which is the maximum; try again",
        )

    async def read(
        self, request: Request, model: type[BodyT], completions: RequestRunner
    ) -> tuple[BodyT, tuple[str, ...]]:
        """The body of a request, and the names of its ignored fields."""
        # A page of another origin can post a plain form here without the browser asking us first, but no JSON.
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise HttpError(415, f"content-type is {content_type or 'not set'}; it must be application/json")
        max_length = completions.models.target.max_length
        biases = completions.bounds.max_logit_biases
        max_values = max(_MIN_VALUES, max_length + _OTHER_VALUES) + biases
        shape = JsonShape(max_values, _MAX_CONTAINERS + biases)
        with closing(Share(self._held)) as share:
            content = await self._content(request, shape, share)
            many = shape.values > _MANY_VALUES or shape.containers > _MANY_CONTAINERS
            try:
                is_large = many or len(content) > LARGE_BYTES
                async with completions.admission.turn() if is_large else nullcontext():
                    return self.parse(model, content)
            except ValidationError as error:
                raise InvalidRequestError("; ".join(_sentences(error))) from None

    async def _content(self, request: Request, shape: JsonShape, share: Share) -> bytes:
        parts: list[bytes] = []
        refusal: TandemError | None = None
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        sentence = f"the body is larger than {self._max_bytes} bytes, which is the most"
                        raise HttpError(413, sentence, "body_too_large")
                    if refusal is not None:
                        continue  # a client that still sends would not see the answer
                    try:
                        shape.feed(part)
                        share.add(len(part))
                        parts.append(part)
                    except TandemError as error:
                        refusal = error
                        parts.clear()
                        share.close()
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise HttpError(400, "the body ended before it was complete") from None
        if refusal is not None:
            raise refusal
        return b"".join(parts)

    def parse(self, model: type[BodyT], content: bytes) -> tuple[BodyT, tuple[str, ...]]:
        """The body, and the names of its ignored fields."""
        body = model.model_validate_json(content)
        names = tuple(body.unknown())
        if self._is_strict:
            shown = [name[:SHOWN_CHARACTERS] for name in names[:_MAX_SENTENCES]]
            refuse(f"{name} is not an option of this request" for name in shown)
        for name in names:
            # Ignored names that are remembered as logged: clients could make up any number of them
            if name not in self._logged and len(self._logged) < 256:
                self._logged.add(name)
                logger.warning("an unknown field is ignored", extra={"field": name[:200]})
        return body, names


_ALTERNATIVES = {
    "str": "a string",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "list[list[int]]": "a list of lists of integers",
    "dict[str,any]": "an object",
    "list[dict[str,any]]": "a list of objects",
}
"""The types of fields that take several, by the names that pydantic's errors have for them, and in words."""

_Place = tuple[int | str, ...]


def _sentences(error: ValidationError) -> list[str]:
    found: dict[_Place, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_place_of(detail), []).append(detail)
    sentences = [_sentence(place, details) for place, details in list(found.items())[:_MAX_SENTENCES]]
    if len(found) > _MAX_SENTENCES:
        sentences.append(f"and {len(found) - _MAX_SENTENCES} more are wrong")
    return sentences


def _place_of(detail: ErrorDetails) -> _Place:
    """Where the error is: for a field of several types, of which pydantic reports an error for each, the field."""
    location = detail["loc"]
    end = next((index for index, part in enumerate(location) if part in _ALTERNATIVES), len(location))
    return tuple(part for part in location[:end] if part != "[key]")


def _sentence(place: _Place, details: Sequence[ErrorDetails]) -> str:
    name = ".".join(map(str, place))
    depth = len(place) + 1
    if len(details) > 1 and all(len(each["loc"]) == depth for each in details):
        kinds = [_ALTERNATIVES[str(each["loc"][-1])] for each in details]
        return f"{name} is {shown(details[0]['input'])}; it must be {', '.join(kinds[:-1])} or {kinds[-1]}"
    # Of several types, the one whose error comes latest in the value is the one that was meant.
    detail = max(details, key=_progress)
    words = f"{detail['msg'][0].lower()}{detail['msg'][1:]}"
    match detail["type"]:
        case "json_invalid":
            return f"the body cannot be read: {words}"
        case "missing":
            return f"{name} is missing"
    if not place:
        return f"the body is not an object: {words}"
    inside = [str(part) for part in detail["loc"][len(place) :] if part not in (*_ALTERNATIVES, "[key]")]
    return f"{'.'.join([name, *inside])} is {shown(detail['input'])}: {words}"


def _progress(detail: ErrorDetails) -> tuple[int, int]:
    last = detail["loc"][-1] if detail["loc"] else 0
    return len(detail["loc"]), last if isinstance(last, int) else 0
