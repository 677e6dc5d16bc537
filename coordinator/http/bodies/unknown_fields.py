"""Unknown fields of a request: refused by name, or ignored, logged once and named in a header."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

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
