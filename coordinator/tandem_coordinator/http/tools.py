"""Tools of a request: its functions, the grammar of calls that it demands, and the calls in its messages.

Calls that the request demands (`tool_choice` required, or a function's name) are bound by a grammar to a form of ours;
`tandem_coordinator.parsers` reads calls that the model makes of its own accord.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tandem.errors import InvalidRequestError
from tandem.model.types import Grammar, GrammarKind
from tandem_coordinator.http.errors import SHOWN_CHARACTERS, shown


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's tools by name."""
    found: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f'tools.{index} must be {{"type": "function", "function": {{"name": ...}}}}'
            )
        if name in found:
            raise InvalidRequestError(f"tools.{index} is named {name[:SHOWN_CHARACTERS]} as another is")
        found[name] = function  # type: ignore[assignment]
    return found


def demanded(choice: Any, functions: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> Grammar | None:
    """The grammar of the calls that a `tool_choice` demands; None where the model chooses."""
    if choice in (None, "none", "auto"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    named = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(named, str):
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)}; it must be none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    if not functions or (named is not None and named not in functions):
        what = "required" if named is None else f"the function {named[:SHOWN_CHARACTERS]}"
        raise InvalidRequestError(f"tool_choice is {what}; tools must hold it")
    wanted = functions if named is None else {named: functions[named]}
    calls = [_call_schema(name, parameters) for name, parameters in _own_parameters(wanted).items()]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if named is not None or not parallel:
        schema["maxItems"] = 1
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _own_parameters(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters of each function, as a schema with an identifier of its own.

    References such as `#/$defs/city` or `#` begin at the innermost schema with an identifier (JSON Schema 2020-12,
    section 8.2.1). Without one, they would begin at the list of calls, where the definitions of all functions meet.
    """
    found: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for index, (name, function) in enumerate(functions.items()):
        parameters = function.get("parameters")
        schema = {"type": "object", **(parameters if isinstance(parameters, dict) else {})}
        if "draft-04" in str(schema.get("$schema")):
            del schema["$schema"]  # it knows no $id
        identifier = schema.get("$id")
        if not isinstance(identifier, str) or not identifier.strip("#") or identifier in taken:
            schema["$id"] = identifier = f"urn:tandem:function:{index}"
        taken.add(identifier)
        found[name] = schema
    return found


def _call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates read it: the arguments of its calls are objects, where OpenAI has their JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        changed.append(call)
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(function["arguments"] or "{}")
                changed[-1] = {**call, "function": {**function, "arguments": arguments}}
    return {**message, "tool_calls": changed}
