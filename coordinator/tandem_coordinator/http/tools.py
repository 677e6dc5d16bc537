"""Tools: the form in which a model writes calls, the grammar of calls that are demanded, and calls as they are written.

A model writes calls as its chat template taught it, and the marks in the template tell which form that is. Calls that
the request demands (`tool_choice` required, or a function's name) are bound by a grammar to a form of ours.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import InvalidRequestError
from tandem.model.types import Grammar, GrammarKind
from tandem_coordinator.decoding.completion import THINK_END
from tandem_coordinator.http.errors import SHOWN_CHARACTERS, shown

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
_SPACE = frozenset(" \t\n\r")
_NO_VALUE = frozenset(",:]}")
"""Characters that begin no value."""


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


@dataclass(slots=True)
class Said:
    """Text of a completion, or of a piece of it, divided into what it is."""

    content: str = ""
    reasoning: str = ""
    """The text of harmony's channel analysis; other forms do not tell it from the content."""
    calls: list[dict[str, Any]] | None = None
    """As OpenAI shows them, whole or as a stream's deltas; None where nobody looks for calls."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a form has calls as JSON objects: between a mark and an end mark, or at the beginning of the text."""

    mark: str
    """Begins calls anywhere in the text."""
    is_text: bool = False
    """True if the mark is shown as text."""
    end: str = ""
    """Ends calls that a mark has begun; empty where they end with the last object or list."""
    opening: str = ""
    """Begins calls where the text begins: models leave out their mark, or it is a special token that is not shown."""
    separator: str = ""
    """Stands between objects that are in no list. White space may stand there too."""


_FORMS: Mapping[str, _Form] = {
    "hermes": _Form("<tool_call>", end="</tool_call>"),
    "mistral": _Form("[TOOL_CALLS]", opening="["),
    "llama3": _Form("<|python_tag|>", opening="{", separator=";"),
    "demanded": _Form(THINK_END, is_text=True, opening="["),
}
_HARMONY_BEGINS = ("<|start|>", "<|channel|>")
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")

_Reading = Generator[None, str]
"""Reads on: it takes the next character at each yield, and an empty text where the text ends."""


@dataclass(slots=True)
class _ObjectCall:
    """A call that is written as an object, as far as it is read."""

    name: str = ""
    arguments: str | None = None
    """None where there are none so far."""
    others: list[str] = field(default_factory=list)
    """Other members, which become content."""
    has_begun: bool = False
    """True once it is among the calls."""


class CallReader:
    """Divides the text of one completion into text, reasoning and calls, as it is written.

    Nothing is lost: whatever does not become a call is content, to the letter. Only a call's own form is neither: its
    marks, the names of its members, its `id`, its `type`, and the white space around it up to the next call or the end
    of the text. A call that has a name and the first character of its arguments remains one, whatever follows.

    The text is read by generators, a character at a time, so that it does not matter how it was cut. Where what was
    read turns out to be no call, it becomes content, and reading goes on with the character that made the difference.
    """

    def __init__(self, form: Parser | Literal["demanded"], *, may_call: bool = True) -> None:
        """`may_call`: the request has tools; without any, calls of harmony's are content too."""
        self.calls: list[dict[str, Any]] = []
        """Calls as far as they are written, as the whole answer shows them."""
        self._may_call = may_call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[dict[str, Any]] = []
        self._fragments: list[str] = []
        """Of the last call's arguments: those that this piece of the text has added."""
        self._held: list[str] = []
        """Characters that may be content or a call's form."""
        self._keep: Callable[[str], None] = self._held.append
        """Takes the characters that are read."""
        self._character = ""
        """The one in view."""
        self._reading = self._read_harmony() if form == HARMONY else self._read_objects(_FORMS[form])
        next(self._reading)

    def read(self, text: str, *, is_last: bool = False) -> Said:
        """More of the text, divided; the last piece has what was held back."""
        self._content = []
        self._reasoning = []
        self._deltas = []
        for character in text:
            self._reading.send(character)
        if is_last:
            self._reading.send("")
        self._end_fragments()
        return Said("".join(self._content), "".join(self._reasoning), self._deltas)

    # ---- what is said

    def _say(self, text: str) -> None:
        self._content.append(text)

    def _think(self, text: str) -> None:
        self._reasoning.append(text)

    def _argue(self, text: str) -> None:
        """More of the last call's arguments."""
        self._fragments.append(text)

    def _release(self, write: Callable[[str], None] | None = None) -> None:
        """Pass on the held characters as content, or to where `write` puts them."""
        (write or self._say)("".join(self._held))
        self._held.clear()

    def _begin_call(self, name: str) -> None:
        self._end_fragments()
        described = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
        self._deltas.append(
            {"index": len(self.calls), **described, "function": {"name": name, "arguments": ""}}
        )
        self.calls.append({**described, "function": {"name": name, "arguments": ""}})
        self._held.clear()

    def _end_fragments(self) -> None:
        """Add the fragments to the last call, and to its delta."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        if not fragment:
            return
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += fragment
        if not self._deltas or self._deltas[-1]["index"] != index:
            self._deltas.append({"index": index, "function": {"arguments": ""}})
        self._deltas[-1]["function"]["arguments"] += fragment

    # ---- characters

    def _next(self) -> _Reading:
        self._keep(self._character)
        self._character = yield

    def _pass_on(self, start: str, write: Callable[[str], None]) -> _Reading:
        """Pass text on up to this character, with which a mark may begin."""
        while self._character != start:
            write(self._character)
            self._character = yield

    def _read_space(self) -> _Reading:
        while self._character in _SPACE:
            yield from self._next()

    def _read_word(self, *words: str) -> Generator[None, str, str]:
        """Read one of these words, of which none begins another; an empty text where another character comes first."""
        read = ""
        while read not in words:
            longer = read + self._character
            if not self._character or not any(word.startswith(longer) for word in words):
                return ""
            yield from self._next()
            read = longer
        return read

    def _read_string(self) -> Generator[None, str, str | None]:
        """Read a string of JSON: its text, or None where there is none."""
        if not (yield from self._read_word('"')):
            return None
        string: list[str] = []
        is_escaped = False
        while self._character != '"' or is_escaped:
            if not self._character:
                return None
            is_escaped = self._character == "\\" and not is_escaped
            string.append(self._character)
            self._keep(self._character)
            self._character = yield
        yield from self._next()
        return _unquote("".join(string))

    def _read_value(self) -> Generator[None, str, bool]:
        """Read a value of JSON; False where there is none, or the text ends first.

        Only its strings and its brackets are looked at.
        """
        if self._character in _NO_VALUE:
            return False
        depth = 0
        while self._character:
            character = self._character
            if character == '"':
                if (yield from self._read_string()) is None:
                    return False
            elif depth == 0 and character in _NO_VALUE | _SPACE:
                return True
            else:
                depth += (character in "{[") - (character in "}]")
                self._keep(character)
                self._character = yield
            if depth == 0 and character in '"]}':
                return True
        return False

    # ---- calls as objects

    def _read_objects(self, form: _Form) -> _Reading:
        """Text with calls as objects."""
        self._character = yield
        may_open = bool(form.opening)
        if may_open:
            yield from self._read_space()
        while True:
            if not may_open:
                yield from self._pass_on(form.mark[0], self._say)
            has_mark = yield from self._read_word(form.mark)
            begun = "".join(self._held).strip()  # the opening may be the mark's own beginning
            if has_mark:
                if form.is_text:
                    self._release()
                yield from self._read_calls(form, is_marked=not form.is_text)
            elif may_open and (begun or self._character) == form.opening:
                yield from self._read_calls(form, is_marked=False, is_list=bool(begun))
            may_open = False
            self._release()

    def _read_calls(self, form: _Form, *, is_marked: bool, is_list: bool = False) -> _Reading:
        """Read calls, if there are any, and those behind the marks that follow. What is held then is content.

        `is_list`: the bracket of a list has been read.
        """
        mark = "" if form.is_text else form.mark
        while (yield from self._read_group(form, is_marked=is_marked, is_list=is_list)):
            end = form.end if is_marked else ""
            found = yield from self._read_word(*filter(None, (end, mark)))
            if found and found == end:
                yield from self._pass_over_form()
                found = yield from self._read_word(mark)
            if not found:
                return
            is_marked = True
            is_list = False

    def _read_group(self, form: _Form, *, is_marked: bool, is_list: bool) -> Generator[None, str, bool]:
        """Read calls that follow each other, or a list of calls; False where something else came."""
        yield from self._read_space()
        is_list = is_list or bool((yield from self._read_word("[")))
        separator = "," if is_list else form.separator
        may_follow = True
        while may_follow:
            yield from self._read_space()
            if not (yield from self._read_call(is_marked=is_marked)):
                return False
            is_separated = bool(separator) and bool((yield from self._read_word(separator)))
            may_follow = is_separated or (self._character == "{" and not is_list)
        if is_list:
            if not (yield from self._read_word("]")):
                return False
            yield from self._pass_over_form()
        return True

    def _read_call(self, *, is_marked: bool) -> Generator[None, str, bool]:
        """Read an object that has a name and arguments, in any order; False where something else came.

        Its other members are content. Behind a mark, arguments may be left out.
        """
        if not (yield from self._read_word("{")):
            return False
        call = _ObjectCall()
        may_follow = True
        while may_follow:
            yield from self._read_space()
            if not (yield from self._read_member(call)):
                return False
            self._show(call)
            yield from self._read_space()
            may_follow = bool((yield from self._read_word(",")))
        if not (yield from self._read_word("}")):
            return False
        if not call.has_begun:
            if not call.name or not is_marked:
                return False
            call.arguments = "{}"
            self._show(call)
        yield from self._pass_over_form()
        return True

    def _read_member(self, call: _ObjectCall) -> Generator[None, str, bool]:
        """Read a member of a call; False where something else came."""
        start = len(self._held)
        key = yield from self._read_string()
        yield from self._read_space()
        if key is None or not (yield from self._read_word(":")):
            return False
        yield from self._read_space()
        if key in _ARGUMENTS:
            return (yield from self._read_arguments(call))
        value_start = len(self._held)
        if not (yield from self._read_value()):
            return False
        value = "".join(self._held[value_start:])
        if key == "name":
            if call.name or not value.startswith('"'):
                return False
            call.name = _unquote(value[1:-1])
            return bool(call.name)
        if key != "id" and (key, value) != ("type", '"function"'):
            call.others.append("".join(self._held[start:]))
        return True

    def _read_arguments(self, call: _ObjectCall) -> Generator[None, str, bool]:
        """Read the value of a call's arguments, and pass it on as it is written if the name is known."""
        if call.arguments is not None or not self._character or self._character in _NO_VALUE:
            return False
        if call.name:
            call.arguments = ""
            self._show(call)
            self._keep = self._argue
        start = len(self._held)
        is_whole = yield from self._read_value()
        self._keep = self._held.append
        if not call.has_begun:
            call.arguments = "".join(self._held[start:])
        return is_whole

    def _show(self, call: _ObjectCall) -> None:
        """Begin a call once its name and its arguments are known. What is held then is its form."""
        if not call.name or call.arguments is None:
            return
        if not call.has_begun:
            call.has_begun = True
            self._begin_call(call.name)
            self._argue(call.arguments)
        self._say("".join(call.others))
        call.others.clear()
        self._held.clear()

    def _pass_over_form(self) -> _Reading:
        """Drop the held characters, a call's form, and the white space behind them if the text ends with it."""
        self._held.clear()
        yield from self._read_space()
        if not self._character:
            self._held.clear()

    # ---- calls as messages

    def _read_harmony(self) -> _Reading:
        """Messages with channels, such as `<|channel|>analysis<|message|>...<|end|>`.

        The last one is a call, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or
        of the channel final (https://cookbook.openai.com/articles/openai-harmony). Special tokens are in the text.
        """
        self._character = yield
        while True:
            yield from self._pass_on("<", self._say)
            mark = yield from self._read_word(*_HARMONY_BEGINS)
            while mark in _HARMONY_BEGINS:
                write = yield from self._read_head(mark)
                mark = ""
                if write is not None:
                    mark = yield from self._read_body(write)
            self._release()

    def _read_body(self, write: Callable[[str], None]) -> Generator[None, str, str]:
        """Read a message's text up to a mark: the mark."""
        mark = ""
        while not mark:
            self._release(write)
            yield from self._pass_on("<", write)
            mark = yield from self._read_word(*_HARMONY_ENDS, *_HARMONY_BEGINS)
        if mark in _HARMONY_ENDS:
            self._held.clear()
        return mark

    def _read_head(self, mark: str) -> Generator[None, str, Callable[[str], None] | None]:
        """Read a message's head behind its first mark: what takes the message's text, or None if it is no head."""
        recipient = ""
        if mark == "<|start|>":
            if not (yield from self._read_word("assistant")):
                return None
            recipient = yield from self._read_recipient()
            if not (yield from self._read_word("<|channel|>")):
                return None
        channel = yield from self._read_word("analysis", "commentary", "final")
        recipient = (yield from self._read_recipient()) or recipient
        yield from self._read_space()
        found = yield from self._read_word("<|constrain|>", "<|message|>", "json")
        if found == "<|constrain|>":
            found = yield from self._read_word("json")
        if found == "json":
            found = yield from self._read_word("<|message|>")
        if not channel or found != "<|message|>":
            return None
        if recipient:
            if not self._may_call:
                return None
            self._begin_call(recipient)
            return self._argue
        self._held.clear()
        return self._think if channel == "analysis" else self._say

    def _read_recipient(self) -> Generator[None, str, str]:
        """Read the function that a message calls; an empty text where it calls none."""
        yield from self._read_space()
        if not (yield from self._read_word("to=functions.")):
            return ""
        start = len(self._held)
        while self._character and self._character not in _SPACE and self._character != "<":
            yield from self._next()
        name = "".join(self._held[start:])
        yield from self._read_space()
        return name


def _unquote(string: str) -> str:
    """The text of a string of JSON, given without its quotes; as it is where a model has made up an escape."""
    try:
        text: str = json.loads(f'"{string}"', strict=False)
    except ValueError:
        return string
    return text
