"""Tools: the form in which a model writes calls, the grammar of calls that are demanded, and calls as they are written.

A model writes calls as its chat template taught it, and the marks in the template tell which form that is. Calls that
the request demands (`tool_choice` required, or a function's name) are bound by a grammar to a form of ours.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.http.errors import SHOWN_CHARACTERS
from tandem.errors import InvalidRequestError
from tandem.types import Grammar, GrammarKind

Parser = Literal["hermes", "llama3", "mistral", "harmony"]
"""Names of the forms: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Qwen writes it too;
`{"name": ..., "parameters": ...}` as the whole text; `[TOOL_CALLS] [{"name": ..., "arguments": ...}]`; messages with
channels, as GPT-OSS writes them (`HarmonyReader`)."""
HARMONY: Parser = "harmony"

_MARKS: Mapping[Parser, tuple[str, ...]] = {
    HARMONY: ("<|channel|>",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", '"parameters"'),
}
"""Markers that a template of each form writes."""
_ARGUMENTS = ("arguments", "parameters")
_HERMES_END = "</tool_call>"


def parser_of(template: str) -> Parser:
    """The form of a chat template; hermes where it says nothing of calls."""
    return next((name for name, marks in _MARKS.items() if any(mark in template for mark in marks)), "hermes")


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's tools by name.

    Raises:
        InvalidRequestError: one is no function with a name, or two have the same.
    """
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
    """The grammar of the calls that a `tool_choice` demands; None where the model chooses.

    Raises:
        InvalidRequestError: the choice is no known one, or demands what is not there.
    """
    if choice in (None, "none", "auto"):
        return None
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if choice != "required" and not isinstance(named, str):
        shown = json.dumps(choice, ensure_ascii=False, default=str)[:SHOWN_CHARACTERS]
        raise InvalidRequestError(
            f'tool_choice is {shown}; it must be none, auto, required, or {{"type": "function", "function": {{"name": '
            "...}}"
        )
    if not functions or (named is not None and named not in functions):
        what = "required" if named is None else f"the function {named[:SHOWN_CHARACTERS]}"
        raise InvalidRequestError(f"tool_choice is {what}; tools must hold it")
    wanted = functions if named is None else {named: functions[named]}
    calls = [_call(name, function.get("parameters")) for name, function in wanted.items()]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if named is not None or not parallel:
        schema["maxItems"] = 1
    definitions: dict[str, Any] = {}
    for call in calls:
        parameters = call["properties"]["arguments"]
        for place in ("$defs", "definitions"):  # references name them from the schema's root
            definitions.setdefault(place, {}).update(parameters.pop(place, {}))
    schema |= {place: own for place, own in definitions.items() if own}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _call(name: str, parameters: Any) -> dict[str, Any]:
    arguments = dict(parameters) if isinstance(parameters, dict) else {}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object", **arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates read it: the arguments of its calls are objects, where OpenAI has their JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(slots=True)
class Call:
    """A call as far as it is written."""

    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")
    arguments: str = ""

    @property
    def whole(self) -> dict[str, Any]:
        """As the whole answer shows it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


_HARMONY_MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_HARMONY_PART = re.compile(r"<(?:\|[a-z]*\|?)?$")
_HARMONY_CALL = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyReader:
    """Divides messages with channels into text, reasoning and calls, as they are written.

    A completion has messages such as `<|channel|>analysis<|message|>...<|end|>`, and ends with a call,
    `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or with a message of the
    channel final (https://cookbook.openai.com/articles/openai-harmony). Special tokens are in the text.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.reasoning = ""
        """Text of the channel analysis, since somebody took it."""
        self._waiting = ""
        """Text that may be the beginning of a mark."""
        self._head = ""
        """The head of the next message, as far as it is written."""
        self._part: Literal["head", "text", "reasoning", "call"] = "head"

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        content = ""
        deltas: list[dict[str, Any]] = []
        self._waiting += text
        while self._waiting:
            mark = _HARMONY_MARK.search(self._waiting)
            end = mark or _HARMONY_PART.search(self._waiting)
            before = self._waiting[: end.start()] if end else self._waiting
            content += self._add(before, deltas)
            self._waiting = self._waiting[mark.end() if mark else len(before) :]
            if mark is None:
                break
            self._pass(mark[0], deltas)
        return content, deltas

    def finish(self) -> str:
        """The end: text that was held back, or a text without any message."""
        text, self._waiting = self._waiting, ""
        is_plain = self._part == "head" and "<|" not in self._head and not self.calls
        return self._head + text if is_plain else self._add(text, [])

    def _add(self, text: str, deltas: list[dict[str, Any]]) -> str:
        """Add text to what it belongs to: the part that is text for the reader."""
        if self._part == "head":
            self._head += text
        elif self._part == "reasoning":
            self.reasoning += text
        elif self._part == "call" and text:
            _add(deltas, len(self.calls) - 1, self.calls[-1], text)
        return text if self._part == "text" else ""

    def _pass(self, mark: str, deltas: list[dict[str, Any]]) -> None:
        if mark != "<|message|>":
            self._head = (self._head if self._part == "head" else "") + mark
            self._part = "head"
        elif called := _HARMONY_CALL.search(self._head):
            self.calls.append(Call(called[1]))
            deltas.append(_begun(len(self.calls) - 1, self.calls[-1]))
            self._part = "call"
        else:
            self._part = "reasoning" if "<|channel|>analysis" in self._head else "text"


class CallReader:
    """Divides the text of one completion into text and calls, as it is written."""

    reasoning = ""
    """It is not told from the text."""

    def __init__(self, parser: Literal["hermes", "llama3", "mistral", "demanded"]) -> None:
        self.calls: list[Call] = []
        self._starts = {
            "hermes": ("<tool_call>",),
            "mistral": ("[TOOL_CALLS]", "[{"),
            "llama3": ("<|python_tag|>", "{"),
            "demanded": ("[",),
        }[parser]
        self._only_first = parser != "hermes"
        """Calls are the whole text: whatever begins with anything else is text to its end."""
        self._waiting = ""
        """Text that may be the beginning of a mark."""
        self._is_text = False
        """True once the text is known to hold no call."""
        self._object: _ObjectReader | None = None
        """The calls' objects are read; between two of them, and around, everything is passed over."""
        self._in_calls = False

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """More of the text: the part that is text, and deltas of calls as OpenAI's streams have them."""
        content: list[str] = []
        deltas: list[dict[str, Any]] = []
        self._waiting += text
        while self._waiting:
            rest = self._in(content, deltas) if self._in_calls else self._out(content)
            if rest is None:
                break
            self._waiting = rest
        return "".join(content), deltas

    def finish(self) -> str:
        """The end: text that was held back."""
        text, self._waiting = self._waiting, ""
        if self._object is not None and self._object.call is None:
            text = self._object.raw + text  # it was no call after all
        elif self._in_calls:
            text = ""
        return text

    def _out(self, content: list[str]) -> str | None:
        """Outside calls: what is left to read; None for as long as it may be the beginning of a mark."""
        text = self._waiting
        if self._is_text:
            content.append(text)
            return ""
        if self._only_first:
            begun = text.lstrip()
            for start in self._starts:
                if begun.startswith(start):
                    self._in_calls = True
                    return begun[len(start) - (start[-1] == "{") :]
            if any(start.startswith(begun) for start in self._starts):
                return None
            self._is_text = True
            return text
        (start,) = self._starts
        if self.calls:  # calls stand on lines of their own
            text = self._waiting = text.lstrip()
        found = text.find(start)
        if found >= 0:
            self._in_calls = True
            content.append(text[:found])
            return text[found + len(start) :]
        held = next(
            (n for n in range(min(len(text), len(start) - 1), 0, -1) if start.startswith(text[-n:])), 0
        )
        content.append(text[: len(text) - held])
        self._waiting = text[len(text) - held :]
        return None

    def _in(self, content: list[str], deltas: list[dict[str, Any]]) -> str | None:
        """Among calls: as `_out`."""
        if self._object is None:
            return self._between()
        for place, character in enumerate(self._waiting):
            self._read_object(self._object, character, deltas)
            if self._object.is_over:
                rest = self._waiting[place + 1 :]
                if self._object.call is None:  # an object without a name is no call
                    content.append(self._object.raw)
                    self._in_calls, self._is_text = False, self._only_first
                self._object = None
                return rest
        self._waiting = ""
        return None

    def _between(self) -> str | None:
        """Before, between and behind objects."""
        text, end = self._waiting, self._waiting.find(_HERMES_END)
        begin = text.find("{")
        if not self._only_first and end >= 0 and not 0 <= begin < end:
            self._in_calls = False
            return text[end + len(_HERMES_END) :]
        if begin < 0:
            self._waiting = text[-len(_HERMES_END) :]
            return None
        self._object = _ObjectReader()
        return text[begin:]

    def _read_object(self, reader: _ObjectReader, character: str, deltas: list[dict[str, Any]]) -> None:
        was_call, fragment = reader.call is not None, reader.read(character)
        if reader.call is None:
            return
        if not was_call:
            self.calls.append(reader.call)
            deltas.append(_begun(len(self.calls) - 1, reader.call))
        if reader.is_over and not reader.call.arguments:
            fragment = "{}"
        if fragment:
            _add(deltas, len(self.calls) - 1, reader.call, fragment)


def _begun(index: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": ""}
    return {"index": index, "id": call.call_id, "type": "function", "function": function}


def _add(deltas: list[dict[str, Any]], index: int, call: Call, fragment: str) -> None:
    call.arguments += fragment
    if deltas and deltas[-1]["index"] == index:
        deltas[-1]["function"]["arguments"] += fragment
    else:
        deltas.append({"index": index, "function": {"arguments": fragment}})


class _ObjectReader:
    """Reads the object of a call character by character: its name, then its arguments, which are passed on."""

    def __init__(self) -> None:
        self.raw = ""
        """All of it, for as long as it is not known to be a call."""
        self.call: Call | None = None
        self.is_over = False
        self._depth = 0
        self._is_string = self._is_escaped = False
        self._key: str | None = None
        """The member whose value is read, at the first depth."""
        self._string = ""
        self._passes_on = False

    def read(self, character: str) -> str:
        """The part of the arguments that this character is."""
        if self.call is None:
            self.raw += character
        was_inside = self._passes_on
        if self._is_string:
            self._read_string(character)
        elif character == '"':
            self._is_string, self._string = True, ""
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.is_over, self._passes_on = True, False
                return ""
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key = json.loads(f'"{self._string}"', strict=False)
            self._passes_on = self.call is not None and self._key in _ARGUMENTS
            return ""
        elif self._depth == 1 and character == ",":
            self._key, self._passes_on = None, False
            return ""
        is_space = character.isspace() and not self._is_string and not (self.call and self.call.arguments)
        return character if (was_inside or self._passes_on) and not is_space else ""

    def _read_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            if self._depth == 1 and self._key == "name" and self.call is None:
                self.call = Call(json.loads(f'"{self._string}"', strict=False))
            return
        self._string += character


def reader_of(form: Parser | Literal["demanded"]) -> CallReader | HarmonyReader:
    """The reader of completions of this form."""
    return HarmonyReader() if form == "harmony" else CallReader(form)
