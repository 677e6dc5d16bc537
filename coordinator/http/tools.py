"""Tools: the form in which a model writes calls, the grammar of calls that are demanded, and calls as they are written.

A model writes calls as its chat template taught it, and the marks in the template tell which form that is. Calls that
the request demands (`tool_choice` required, or a function's name) are bound by a grammar to a form of ours.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.http.errors import SHOWN_CHARACTERS, shown
from tandem.errors import InvalidRequestError
from tandem.types import Grammar, GrammarKind

Parser = Literal["hermes", "llama3", "mistral", "harmony"]
"""Names of the forms: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Qwen writes it too;
`{"name": ..., "parameters": ...}` as the whole text; `[TOOL_CALLS] [{"name": ..., "arguments": ...}]`; messages with
channels, as GPT-OSS writes them."""
HARMONY: Parser = "harmony"

_MARKS: Mapping[Parser, tuple[str, ...]] = {
    HARMONY: ("<|channel|>",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", '"parameters"'),
}
"""Markers that a template of each form writes."""
_ARGUMENTS = ("arguments", "parameters")


def parser_of(template: str) -> Parser:
    """The form of a chat template; hermes where it says nothing of calls."""
    return next((name for name, marks in _MARKS.items() if any(mark in template for mark in marks)), "hermes")


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
    calls: list[dict[str, Any]] = []
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if named is not None or not parallel:
        schema["maxItems"] = 1
    for name, function in wanted.items():
        parameters = function.get("parameters")
        arguments = {"type": "object", **(parameters if isinstance(parameters, dict) else {})}
        for place in ("$defs", "definitions"):  # references name them from the schema's root
            if isinstance(arguments.get(place), dict):
                schema.setdefault(place, {}).update(arguments.pop(place))
        properties = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": [*properties]}
        calls.append({**call, "additionalProperties": False})
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


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


@dataclass(slots=True)
class Said:
    """Text of a completion, or of a piece of it, divided into what it is."""

    content: str = ""
    reasoning: str = ""
    """What harmony's channel analysis has; other forms do not tell it from the text."""
    calls: list[dict[str, Any]] | None = None
    """As OpenAI shows them, whole or as a stream's deltas; None where nobody looks for calls."""


_HARMONY_MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_HARMONY_PART = re.compile(r"<(?:\|[a-z]*\|?)?$")
_HARMONY_CALL = re.compile(r"to=functions\.([^\s<]+)")
_CALLS_BETWEEN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "hermes": (("<tool_call>",), "</tool_call>"),
    "mistral": (("[TOOL_CALLS]", "[{"), ""),
    "llama3": (("<|python_tag|>", "{"), ""),
    "demanded": (("[",), ""),
}
"""By form: what begins calls, and what ends them, with text around; without an end the text is calls as a whole."""


class CallReader:
    """Divides the text of one completion into text, reasoning and calls, as it is written."""

    def __init__(self, form: Parser | Literal["demanded"]) -> None:
        self.calls: list[dict[str, Any]] = []
        """Calls as far as they are written, as the whole answer shows them."""
        self._said, self._deltas = Said(), list[dict[str, Any]]()
        self._held = ""
        """What may be text or not: the beginning of a mark, or an object that has no name so far."""
        self._head = ""
        """The head of harmony's next message, as far as it is written."""
        self._write: Callable[[str], None] = self._say
        """Takes text that is held no longer."""
        self._form = form
        self._parser = self._harmony() if form == HARMONY else self._marked(*_CALLS_BETWEEN[form])
        next(self._parser)

    def read(self, text: str, *, is_last: bool = False) -> Said:
        """More of the text, divided; the last piece has what was held back, or what has no message at all."""
        self._deltas = []
        said = self._said = Said(calls=self._deltas)
        for piece in [text] if self._form == HARMONY else text:
            self._parser.send(piece)
        if is_last:
            self._write(self._held)
            if "<|" not in self._head:
                self._say(self._head)
        return said

    def _say(self, text: str) -> None:
        self._said.content += text

    def _think(self, text: str) -> None:
        self._said.reasoning += text

    def _keep_head(self, text: str) -> None:
        self._head += text

    def _begin_call(self, name: str) -> None:
        described = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
        self._deltas.append(
            {"index": len(self.calls), **described, "function": {"name": name, "arguments": ""}}
        )
        self.calls.append({**described, "function": {"name": name, "arguments": ""}})

    def _argue(self, fragment: str) -> None:
        """More of the last call's arguments."""
        if not fragment:
            return
        index, deltas = len(self.calls) - 1, self._deltas
        self.calls[index]["function"]["arguments"] += fragment
        if not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += fragment

    # These generators take a text at each yield; all but harmony's take a character.

    def _harmony(self) -> Generator[None, str, None]:
        """Messages with channels, such as `<|channel|>analysis<|message|>...<|end|>`.

        The last one is a call, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or
        of the channel final (https://cookbook.openai.com/articles/openai-harmony). Special tokens are in the text.
        """
        self._write = self._keep_head
        while True:
            text = yield
            self._held += text
            while mark := _HARMONY_MARK.search(self._held):
                self._write(self._held[: mark.start()])
                self._held = self._held[mark.end() :]
                if mark[0] != "<|message|>":
                    self._head += mark[0]
                    self._write = self._keep_head
                    continue
                head, self._head = self._head, ""
                if called := _HARMONY_CALL.search(head):
                    self._begin_call(called[1])
                    self._write = self._argue
                else:
                    self._write = self._think if "<|channel|>analysis" in head else self._say
            part = _HARMONY_PART.search(self._held)
            end = part.start() if part else len(self._held)
            self._write(self._held[:end])
            self._held = self._held[end:]

    def _marked(self, starts: Sequence[str], end: str) -> Generator[None, str, None]:
        """Text with calls between marks; without an end mark the whole text is calls, or none of it is.

        Around objects, everything between the marks is passed over.
        """
        follows_call = False
        while True:
            begun = ""
            while begun not in starts:
                self._held += yield
                if follows_call:  # calls stand on lines of their own
                    self._held = self._held.lstrip()
                begun = self._held if end else self._held.lstrip()
                while not any(start.startswith(begun) for start in starts):
                    if not end:
                        yield from self._text()
                    self._say(self._held[0])
                    begun = self._held = self._held[1:]
                    follows_call = False
            self._held, passed, is_call = "", begun[-1], True
            while is_call and not (end and passed.endswith(end)):
                if passed.endswith("{"):
                    is_call, passed = (yield from self._object()), ""
                else:
                    passed += yield
            if not end:
                yield from self._text()
            follows_call = is_call
            self._say(self._held)
            self._held = ""

    def _text(self) -> Generator[None, str, None]:
        self._say(self._held)
        self._held = ""
        while True:
            self._say((yield))

    def _object(self) -> Generator[None, str, bool]:
        """Read an object from behind its brace, and pass its arguments on; false if it has no name and is no call."""
        self._held, is_call = "{", False
        key: str | None = None  # of the member whose value is read
        depth, string, in_string, is_escaped = 1, "", False, False
        while depth:
            character = yield
            ends_string = False
            if in_string:
                ends_string = character == '"' and not is_escaped
                is_escaped = character == "\\" and not is_escaped
                in_string = not ends_string
                string += character
            else:
                depth += (character in "{[") - (character in "}]")
                if depth == 0 or (depth == 1 and character == ","):
                    key = None
                if character == '"':
                    in_string, string = True, ""
            if not is_call:
                self._held += character
            elif key in _ARGUMENTS and (self.calls[-1]["function"]["arguments"] or not character.isspace()):
                self._argue(character)
            if depth == 1 and ends_string and key == "name" and not is_call:
                self._begin_call(_unquoted(string))
                self._held, is_call = "", True
            elif depth == 1 and character == ":" and key is None and not (in_string or ends_string):
                key = _unquoted(string)
        if is_call and not self.calls[-1]["function"]["arguments"]:
            self._argue("{}")
        return is_call


def _unquoted(string: str) -> str:
    """The text of a string of JSON, given with its closing quote; as it is where a model has made up an escape."""
    try:
        text: str = json.loads(f'"{string}', strict=False)
    except ValueError:
        return string[:-1]
    return text
