"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from tandem import errors
from tandem.serving.interceptors import ended_by

SHOWN_CHARACTERS = 80
"""Characters of a refused value that a message shows: a line."""

_NO_NAMES: Mapping[str, str] = {}

# Sentences begin with the option that they are about.
_OPTION = re.compile(r"(?:the (?=prompt\b))?([a-z][a-z_0-9.]*) (?:is|has|holds|names)\b")


class HttpError(errors.TandemError):
    """A request that HTTP itself has a status for: its path, its method, its size."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


# Status, type and code of each branch of the tree; the nearest counts.
_FORMS: Mapping[type[errors.TandemError], tuple[int, str, str | None]] = {
    errors.InvalidRequestError: (400, "invalid_request_error", None),
    errors.NotFoundError: (404, "invalid_request_error", "not_found"),
    errors.UnauthenticatedError: (401, "authentication_error", "invalid_api_key"),
    errors.PermissionDeniedError: (403, "permission_error", "insufficient_permissions"),
    errors.CapacityError: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.ServiceUnavailableError: (503, "server_error", "service_unavailable"),
    errors.ConfigurationError: (503, "server_error", "service_unavailable"),
    errors.DeadlineError: (504, "server_error", "deadline_exceeded"),
    errors.AbortedError: (409, "server_error", "aborted"),
    errors.TandemError: (500, "server_error", None),
}


ANTHROPIC_PATH = "/v1/messages"
"""Paths that begin with it have Anthropic's API."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's words for errors, by their status (https://docs.anthropic.com/en/api/errors)."""


def shown(value: object) -> str:
    """The beginning of a refused value, as a request spells it."""
    beginning = value[:SHOWN_CHARACTERS] if isinstance(value, str | list) else value
    return json.dumps(beginning, ensure_ascii=False, default=str)[:SHOWN_CHARACTERS]


def error_response(error: Exception, path: str = "", names: Mapping[str, str] = _NO_NAMES) -> JSONResponse:
    """The answer to a request at a path that failed with this error, in the form of the path's API. `names` are the
    request's own for options that it has under other names."""
    error = known(error)
    status, kind, _ = _form(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, errors.CapacityError) and (seconds := error.retry_after_seconds) is not None:
        # OpenAI's clients read the second header first: Retry-After has whole seconds only.
        headers |= {"Retry-After": f"{math.ceil(seconds)}", "Retry-After-Ms": f"{math.ceil(seconds * 1000)}"}
    if kind == "authentication_error":
        headers["WWW-Authenticate"] = "Bearer"
    content = anthropic_error_object(error) if path.startswith(ANTHROPIC_PATH) else error_object(error, names)
    return JSONResponse(content, status, headers)


def error_object(error: errors.TandemError, names: Mapping[str, str] = _NO_NAMES) -> dict[str, Any]:
    """The error as the body of an answer, or as an event of a stream that has begun."""
    _, kind, code = _form(error)
    named = _OPTION.match(str(error)) if isinstance(error, errors.InvalidRequestError) else None
    param = names.get(named[1], named[1]) if named else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def anthropic_error_object(error: errors.TandemError) -> dict[str, Any]:
    """The same in the form that Anthropic's clients read."""
    status = _form(error)[0]
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def known(error: Exception) -> errors.TandemError:
    """The error; in place of an unexpected one, an id under which the log has the details."""
    return error if isinstance(error, errors.TandemError) else errors.TandemError(ended_by(error).sentence)


def _form(error: errors.TandemError) -> tuple[int, str, str | None]:
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return error.status, kind, error.code
    return next(_FORMS[cls] for cls in type(error).__mro__ if cls in _FORMS)
