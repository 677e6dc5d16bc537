"""The form that a body asks of its completion: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.http.errors import SHOWN_CHARACTERS
from tandem.errors import InvalidRequestError
from tandem.types import Grammar, GrammarKind


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


_FORMS: Mapping[str, tuple[GrammarKind, Callable[[Any], bool], str]] = {
    "json": (GrammarKind.JSON_SCHEMA, lambda value: isinstance(value, str | dict | bool), "a JSON schema"),
    "regex": (GrammarKind.REGEX, _is_text, "a text"),
    "choice": (GrammarKind.CHOICE, _are_texts, "a list of texts"),
    "grammar": (GrammarKind.GRAMMAR, _is_text, "a text"),
    "json_object": (GrammarKind.JSON_OBJECT, lambda value: value is True, "true"),
}
"""By vLLM's names: the kind of grammar, which values make one, and those values in words."""


def _grammar(form: str, name: str, value: Any) -> Grammar:
    kind, makes_one, wanted = _FORMS[form]
    if not makes_one(value):
        raise _wrong(name, value, wanted)
    if kind is GrammarKind.JSON_OBJECT:
        return Grammar(kind)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def grammar_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> Grammar | None:
    """The grammar that a body asks for; None for none.

    Args:
        response_format: OpenAI's field.
        structured_outputs: vLLM's.
        guided: vLLM's older ones, by the names of the newer.

    Raises:
        InvalidRequestError: there are several, or one is not as it should be.
    """
    found = [_of_format(response_format), _of_outputs(structured_outputs)]
    found += [_grammar(name, f"guided_{name}", value) for name, value in guided.items() if value is not None]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidRequestError(
            f"the completion's form is given {len(grammars)} times; response_format or structured_outputs must say it "
            "once"
        )
    return grammars[0] if grammars else None


def _of_format(value: Mapping[str, Any] | None) -> Grammar | None:
    kind = "text" if value is None else value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind != "json_schema":
        raise _wrong("response_format.type", kind, "text, json_object or json_schema")
    described = (value or {}).get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise _wrong("response_format.json_schema", described, 'an object with "schema"')
    return _grammar("json", "response_format.json_schema.schema", described["schema"])


def _of_outputs(value: Mapping[str, Any] | None) -> Grammar | None:
    given = {name: own for name, own in (value or {}).items() if own is not None}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _FORMS.keys():
        raise InvalidRequestError(
            f"structured_outputs has {', '.join(map(str, given))[:SHOWN_CHARACTERS]}; it must have one of "
            f"{', '.join(_FORMS)}"
        )
    ((name, own),) = given.items()
    return _grammar(name, f"structured_outputs.{name}", own)


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    shown = json.dumps(value, ensure_ascii=False, default=str)[:SHOWN_CHARACTERS]
    return InvalidRequestError(f"{name} is {shown}; it must be {wanted}")
