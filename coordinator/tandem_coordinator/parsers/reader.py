"""The text of a completion as it is written, divided into content, reasoning and calls of tools."""

from __future__ import annotations

import json
import string
import uuid
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_coordinator.parsers.forms import (
    CallForm,
    ChannelMessages,
    NamedCalls,
    ObjectCalls,
    PythonCalls,
    ReasoningForm,
    TaggedCalls,
)
from tandem_coordinator.parsers.values import escape_text, json_of, python_as_json, quote, types_of, unescape

_ARGUMENTS = ("arguments", "parameters")
"""Names of the member of an object that has a call's arguments."""
_SPACE = frozenset(" \t\n\r")
_NO_VALUE = frozenset(",:]}")
"""Characters that begin no value."""
_NO_NAME = frozenset("<>[]{}()\"'`,;:=")
"""Characters that the name of a function does not have."""
_OCTAL = "01234567"


@dataclass(slots=True)
class Said:
    """Text of a completion, or of a piece of it, divided into what it is."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] | None = None
    """As OpenAI shows them, whole or as a stream's deltas; None where nobody looks for calls."""
    content_tokens: Sequence[int] | None = None
    """Numbers of the completion's tokens that this content was made of; None where all of them are content."""


_Reading = Generator[None, str]
"""Reads on: it takes the next character at each yield, and an empty text where the text ends."""
_Found = Generator[None, str, str | None]
"""Reads a call, or several: the mark that it has read behind them, or an empty text; None where something else came."""


@dataclass(slots=True)
class _Call:
    """A call, as far as it is written."""

    name: str
    arguments: list[str] = field(default_factory=list)
    """In pieces."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def described(self, arguments: str) -> dict[str, Any]:
        """The call with these arguments in OpenAI's form."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _ObjectCall:
    """An object that may be a call, as far as it is read."""

    name: str = ""
    arguments: str | None = None
    """None where there are none so far."""
    others: list[str] = field(default_factory=list)
    """Other members, which become content."""
    has_begun: bool = False
    """True once it is among the calls."""


class CompletionReader:
    """Divides the text of one completion into content, reasoning and calls, as it is written.

    Nothing is lost: whatever does not become reasoning or a call is content, to the letter. Only the form is neither:
    marks, the names of a call's members, its `id`, its `type`, and the white space around a call up to the next call or
    the end of the text. A call that has a name and the first character of its arguments remains one, whatever follows.

    The text is read by generators, a character at a time, so that it does not matter how it was cut. Where what was
    read turns out to be no call, it becomes content, and reading goes on with the character that made the difference.
    """

    def __init__(
        self,
        calls: CallForm | None,
        reasoning: ReasoningForm | None = None,
        *,
        has_begun_reasoning: bool | None = False,
        functions: Mapping[str, Mapping[str, Any]] | None = None,
        may_call: bool = True,
    ) -> None:
        """Read a completion in these forms.

        Args:
            calls: The form of calls; None where all of the text behind the reasoning is content.
            reasoning: The form of reasoning; None where it is not told from the content.
            has_begun_reasoning: True if the completion begins inside the reasoning, None if it has none.
            functions: The tools of the request by name, whose schemas give types to values that are plain text.
            may_call: False if the request has no tools: calls in a form that has reasoning too are content then.
        """
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far, without its marks."""
        self._is_reasoning = has_begun_reasoning is True
        self._held_tokens = 0
        """Tokens that may be reasoning, or a mark that ends it."""
        self._token_count = 0
        self._open_tokens: list[int] = []
        """Numbers of the tokens that may be content or not."""
        self._content_tokens: list[int] = []
        self._calls: list[_Call] = []
        self._form = calls
        self._reasoning_form = reasoning
        self._has_begun_reasoning = has_begun_reasoning
        self._functions = functions or {}
        self._may_call = may_call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[dict[str, Any]] = []
        self._fragments: list[str] = []
        """Of the last call's arguments, which this piece of the text has added."""
        self._held: list[str] = []
        """Characters that may be content or a call's form."""
        self._keep: Callable[[str], None] = self._held.append
        """Takes the characters that are read."""
        self._character = ""
        """The one in view."""
        is_harmony = calls is not None and isinstance(calls.syntax, ChannelMessages)
        self._reading = self._read_messages(calls) if calls and is_harmony else self._read_text()
        next(self._reading)

    @property
    def has_called(self) -> bool:
        """True once there is a call."""
        return bool(self._calls)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls as far as they are written, as a whole answer shows them."""
        return [call.described("".join(call.arguments)) for call in self._calls]

    def read(self, text: str, token_lengths: Sequence[int] = (), *, is_last: bool = False) -> Said:
        """More of the text, divided; the last piece has what was held back.

        Args:
            text: The piece.
            token_lengths: How many characters of it each of its tokens has.
            is_last: True if the text ends with it.
        """
        self._content = []
        self._reasoning = []
        self._deltas = []
        self._content_tokens = []
        start = 0
        for length in token_lengths:
            before = self._written
            self._read_on(text[start : start + length])
            self._count_token()
            self._open_tokens.append(self._token_count)
            self._token_count += 1
            self._sort_tokens(before)
            start += length
        before = self._written
        self._read_on(text[start:])
        if is_last:
            self._reading.send("")
            if self._is_reasoning:
                self._count_held()
        self._sort_tokens(before)
        self._end_fragments()
        return Said("".join(self._content), "".join(self._reasoning), self._deltas, self._content_tokens)

    @property
    def _written(self) -> tuple[int, int]:
        """Number of pieces of content, and of all others."""
        return len(self._content), len(self._reasoning) + len(self._deltas) + len(self._fragments)

    def _sort_tokens(self, before: tuple[int, int]) -> None:
        """Decide about the open tokens by what was written since then: content is made of them, or something else."""
        contents, others = before
        if any(self._content[contents:]):
            self._content_tokens += self._open_tokens
            self._open_tokens.clear()
        elif self._written[1] != others:
            self._open_tokens.clear()

    def _count_token(self) -> None:
        """Count the token that was read last. A mark is known for one when the next character has come."""
        self._held_tokens = self._held_tokens + 1 if self._is_reasoning else 0
        if not self._held:
            self._count_held()

    def _count_held(self) -> None:
        self.reasoning_tokens += self._held_tokens
        self._held_tokens = 0

    def _read_on(self, text: str) -> None:
        for character in text:
            self._reading.send(character)

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

    def _release_before(self, marks: Sequence[str], write: Callable[[str], None]) -> str:
        """Pass on the held characters, all but the beginning of a mark that they end with: that beginning.

        They were held for a call that was none, and the mark may begin the next one.
        """
        held = "".join(self._held)
        later = held[1:]  # the first one began the call that was none
        found = [later[later.rfind(mark[0]) :] for mark in marks if mark[0] in later]
        begun = max(
            (tail for tail in found if any(mark.startswith(tail) for mark in marks)), key=len, default=""
        )
        write(held.removesuffix(begun))
        self._held[:] = begun
        return begun

    def _begin_call(self, name: str) -> None:
        self._end_fragments()
        self._is_reasoning = False
        call = _Call(name)
        self._deltas.append({"index": len(self._calls), **call.described("")})
        self._calls.append(call)
        self._held.clear()

    def _end_fragments(self) -> None:
        """Add the fragments to the last call, and to its delta."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        if not fragment:
            return
        index = len(self._calls) - 1
        self._calls[index].arguments.append(fragment)
        if not self._deltas or self._deltas[-1]["index"] != index:
            self._deltas.append({"index": index, "function": {"arguments": ""}})
        self._deltas[-1]["function"]["arguments"] += fragment

    # ---- characters

    def _next(self) -> _Reading:
        self._keep(self._character)
        self._character = yield

    def _pass_on(self, starts: Collection[str], write: Callable[[str], None]) -> _Reading:
        """Pass text on up to one of these characters, with which a mark may begin."""
        while self._character not in starts:
            write(self._character)
            self._character = yield

    def _read_space(self) -> _Reading:
        while self._character in _SPACE:
            yield from self._next()

    def _read_word(self, *words: str, begun: str = "") -> Generator[None, str, str]:
        """Read one of these words, of which none begins another; an empty text where another character comes first.

        `begun` is read and held already.
        """
        read = begun
        while read not in words:
            longer = read + self._character
            if not self._character or not any(word.startswith(longer) for word in words):
                return ""
            yield from self._next()
            read = longer
        return read

    def _read_name(self) -> Generator[None, str, str]:
        """Read the name of a function; an empty text where none begins."""
        start = len(self._held)
        while self._character and self._character not in _SPACE and self._character not in _NO_NAME:
            yield from self._next()
        return "".join(self._held[start:])

    def _read_string(self) -> Generator[None, str, str | None]:
        """Read a string of JSON: its text, or None where there is none."""
        if not (yield from self._read_word('"')):
            return None
        body: list[str] = []
        is_escaped = False
        while self._character != '"' or is_escaped:
            if not self._character:
                return None
            is_escaped = self._character == "\\" and not is_escaped
            body.append(self._character)
            self._keep(self._character)
            self._character = yield
        yield from self._next()
        return _unquote("".join(body))

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

    # ---- the text

    def _read_text(self) -> _Reading:
        """Reasoning where the text begins, and then content with calls."""
        self._character = yield
        form = self._form
        begins = _starts_of(form)
        opening = "" if form is None else form.opening
        thoughts = None if self._has_begun_reasoning is None else self._reasoning_form
        if thoughts is not None and self._has_begun_reasoning:
            yield from self._read_reasoning(thoughts)
            thoughts = None
        is_beginning = not self._calls
        begun = self._release_before(begins, self._say)
        while True:
            starts = thoughts.starts if thoughts is not None and is_beginning else ()
            if is_beginning:
                yield from self._read_space()
            elif not begun:
                yield from self._pass_on({begin[0] for begin in begins}, self._say)
            found = yield from self._read_word(*begins, *starts, begun=begun)
            opened = "" if found else "".join(self._held).strip()  # an opening may be a mark's own beginning
            if thoughts is not None and found in starts:
                self._held.clear()
                yield from self._read_reasoning(thoughts)
                thoughts = None
                is_beginning = not self._calls
            else:
                is_opened = is_beginning and bool(opening) and (opened or self._character) == opening
                if form is not None and (found or is_opened):
                    yield from self._read_calls(form, found, is_open=bool(opened))
                else:
                    self._release()
                is_beginning = False
            begun = self._release_before(begins, self._say)

    def _read_reasoning(self, form: ReasoningForm) -> _Reading:
        """Read reasoning up to a mark that ends it, or to a call, before which models leave that mark out.

        A mark that begins it may be written once more.
        """
        self._is_reasoning = True
        calls = self._form
        begins = () if calls is None or calls.shows_begin else _starts_of(calls)
        marks = (*form.ends, *begins)
        starts = form.starts
        begun = ""
        yield from self._read_space()
        while self._is_reasoning:
            if not starts and not begun:
                yield from self._pass_on({mark[0] for mark in marks}, self._think)
            found = yield from self._read_word(*marks, *starts, begun=begun)
            begun = ""
            if found in form.ends:
                self._held.clear()
                self._is_reasoning = False
            elif found in starts:
                self._held.clear()
            elif found and calls is not None:
                yield from self._read_calls(calls, found)
                begun = self._release_before(marks, self._think) if not self._calls else ""
            else:
                self._release(self._think)
            starts = ()

    def _read_calls(self, form: CallForm, begin: str, *, is_open: bool = False) -> _Reading:
        """Read calls, if there are any, and those behind the marks that follow. What is held then is content.

        Args:
            form: How they are written.
            begin: The mark that has been read; empty where the form's opening begins them.
            is_open: True if the opening has been read.
        """
        if form.shows_begin and begin:
            self._release()
        while True:
            found = yield from self._read_group(form, begin, is_open=is_open)
            if found is None:
                return
            others = () if form.shows_begin else _starts_of(form)
            if not found:
                found = yield from self._read_word(*form.ends, *others)
            if found in form.ends:
                yield from self._pass_over_form()
                found = yield from self._read_word(*others)
            if not found:
                return
            begin = found
            is_open = False

    def _read_group(self, form: CallForm, begin: str, *, is_open: bool) -> _Found:
        """Read the calls behind a mark, or those that an opening begins. A call's own start may stand for the mark."""
        if begin in form.begins or not begin:
            yield from self._read_space()
        syntax = form.syntax
        if isinstance(syntax, ObjectCalls) and form.other and not is_open and self._character not in "{[":
            syntax = form.other
        match syntax:
            case ObjectCalls():
                is_marked = bool(begin) and not form.shows_begin
                return (yield from self._read_objects(syntax, is_marked=is_marked, is_list=is_open))
            case NamedCalls():
                return (yield from self._read_named(syntax, has_start=begin == syntax.start))
            case TaggedCalls():
                return (yield from self._read_tagged(syntax, form.ends, has_start=begin == syntax.start))
            case PythonCalls():
                return (yield from self._read_python(is_open=is_open))
            case _:
                return None

    def _pass_over_form(self) -> _Reading:
        """Drop the held characters, a call's form, and the white space behind them if the text ends with it."""
        self._held.clear()
        yield from self._read_space()
        if not self._character:
            self._held.clear()

    # ---- calls as objects

    def _read_objects(self, syntax: ObjectCalls, *, is_marked: bool, is_list: bool) -> _Found:
        """Read calls that follow each other, or a list of calls."""
        is_list = is_list or bool((yield from self._read_word("[")))
        separator = "," if is_list else syntax.separator
        may_follow = True
        while may_follow:
            yield from self._read_space()
            if not (yield from self._read_call(is_marked=is_marked)):
                return None
            is_separated = bool(separator) and bool((yield from self._read_word(separator)))
            may_follow = is_separated or (self._character == "{" and not is_list)
        if is_list:
            if not (yield from self._read_word("]")):
                return None
            yield from self._pass_over_form()
        return ""

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
        start = len(self._held)
        if call.name:
            call.arguments = ""
            self._show(call)
            return (yield from self._stream_value())
        is_whole = yield from self._read_value()
        call.arguments = "".join(self._held[start:])
        return is_whole

    def _stream_value(self) -> Generator[None, str, bool]:
        """Read a value of JSON into the last call's arguments."""
        self._keep = self._argue
        is_whole = yield from self._read_value()
        self._keep = self._held.append
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

    # ---- calls as a name and an object

    def _read_named(self, syntax: NamedCalls, *, has_start: bool) -> _Found:
        """Read a call."""
        if not (yield from self._read_named_call(syntax, has_start=has_start)):
            return None
        yield from self._pass_over_form()
        return ""

    def _read_named_call(self, syntax: NamedCalls, *, has_start: bool) -> Generator[None, str, bool]:
        """Read a call; False where something else came."""
        for mark in (syntax.start if not has_start else "", syntax.kind):
            if mark and not (yield from self._read_word(mark)):
                return False
        name = yield from self._read_name()
        yield from self._read_space()
        marks = filter(None, (syntax.before_arguments, syntax.id_mark))
        mark = yield from self._read_word(*marks)
        if mark and mark == syntax.id_mark:
            yield from self._read_name()
            mark = yield from self._read_word(syntax.before_arguments)
        yield from self._read_space()
        if not name or not (mark or not syntax.needs_mark) or self._character != "{":
            return False
        self._begin_call(name)
        if not (yield from self._stream_value()):
            return False
        if not syntax.end:
            return True
        yield from self._read_space()
        return bool((yield from self._read_word(syntax.end)))

    # ---- calls as a name and tagged arguments

    def _read_tagged(self, syntax: TaggedCalls, ends: tuple[str, ...], *, has_start: bool) -> _Found:
        """Read a call: the mark behind it if that ends its group."""
        if syntax.start and not has_start and not (yield from self._read_word(syntax.start)):
            return None
        name = yield from self._read_name()
        if not name or (syntax.name_end and not (yield from self._read_word(syntax.name_end))):
            return None
        closers = (syntax.end,) if syntax.end else ends
        mark = yield from self._read_tagged_arguments(syntax, name, closers)
        if mark is None or mark in ends:
            return mark
        yield from self._pass_over_form()
        return ""

    def _read_tagged_arguments(self, syntax: TaggedCalls, name: str, closers: tuple[str, ...]) -> _Found:
        """Read the arguments of a call up to one of the marks that close it: that mark."""
        parameters = self._functions.get(name, {}).get("parameters")
        has_begun = False
        while True:
            yield from self._read_space()
            mark = yield from self._read_word(syntax.key_start, *closers)
            key = (yield from self._read_key(syntax)) if mark == syntax.key_start else None
            if key is None:
                break
            if not has_begun:
                self._begin_call(name)
            self._held.clear()
            self._argue(f"{', ' if has_begun else '{'}{quote(key)}: ")
            has_begun = True
            if not (yield from self._read_tagged_value(syntax, types_of(parameters, key))):
                return None
        is_closed = mark in closers
        if is_closed and not has_begun:
            self._begin_call(name)
            self._argue("{")
        if is_closed or has_begun:
            self._argue("}")
        return mark if is_closed else None

    def _read_key(self, syntax: TaggedCalls) -> Generator[None, str, str | None]:
        """Read the name of an argument, up to its value; None where something else came."""
        start = len(self._held)
        while self._character and self._character != syntax.key_end[0]:
            yield from self._next()
        key = "".join(self._held[start:]).strip()
        if not (yield from self._read_word(syntax.key_end)):
            return None
        if syntax.value_start:
            yield from self._read_space()
            if not (yield from self._read_word(syntax.value_start)):
                return None
        return key

    def _read_tagged_value(self, syntax: TaggedCalls, types: frozenset[str]) -> Generator[None, str, bool]:
        """Read a value into the last call's arguments, a string as it is written; False if the text ends first."""
        is_string = types == {"string"}
        written: list[str] = []
        write = self._argue_text if is_string else written.append
        if is_string:
            self._argue('"')
        ends = (syntax.value_end, "\n" + syntax.value_end) if syntax.has_lines else (syntax.value_end,)
        if syntax.has_lines and self._character == "\n":
            self._character = yield
        is_whole = False
        while self._character and not is_whole:
            yield from self._pass_on(("", *(end[0] for end in ends)), write)
            is_whole = bool((yield from self._read_word(*ends)))
            if not is_whole:
                self._release(write)
        self._held.clear()
        if not is_string:
            self._argue(json_of("".join(written), types))
        elif is_whole:
            self._argue('"')
        return is_whole

    def _argue_text(self, text: str) -> None:
        """More of a string in the last call's arguments."""
        self._argue(escape_text(text))

    # ---- calls as Python

    def _read_python(self, *, is_open: bool) -> _Found:
        """Read a list of calls."""
        if not is_open and not (yield from self._read_word("[")):
            return None
        while True:
            yield from self._read_space()
            if not (yield from self._read_python_call()):
                return None
            yield from self._read_space()
            if not (yield from self._read_word(",")):
                break
        if not (yield from self._read_word("]")):
            return None
        yield from self._pass_over_form()
        return ""

    def _read_python_call(self) -> Generator[None, str, bool]:
        """Read a call with keyword arguments; False where something else came."""
        name = yield from self._read_name()
        if not name or not (yield from self._read_word("(")):
            return False
        before = "{"
        may_follow = True
        while may_follow:
            yield from self._read_space()
            if self._character == ")":
                break
            key = yield from self._read_name()
            yield from self._read_space()
            has_value = bool(key) and bool((yield from self._read_word("=")))
            yield from self._read_space()
            start = f"{before}{quote(key)}: "
            begun = name if before == "{" else ""
            if not has_value or not (yield from self._read_python_value(begun, start)):
                if before != "{" and self._held:  # the text did not end inside of a string
                    self._argue("}")
                return False
            before = ", "
            yield from self._read_space()
            may_follow = bool((yield from self._read_word(",")))
        if before != "{":
            self._argue("}")
        if not (yield from self._read_word(")")):
            return False
        if before == "{":
            yield from self._read_space()
            if self._character not in (",", "]"):
                return False
            self._begin_call(name)
            self._argue("{}")
        self._held.clear()
        return True

    def _read_python_value(self, name: str, start: str) -> Generator[None, str, bool]:
        """Read a literal into a call's arguments, a string as it is written; False where something else came.

        Args:
            name: The call to begin once there is a literal; empty where it has begun.
            start: What stands before the literal in the arguments.
        """
        quote = self._character
        if quote in ("'", '"'):
            if name:
                self._begin_call(name)
            self._held.clear()
            self._argue(f'{start}"')
            return (yield from self._stream_python_string(quote))
        first = len(self._held)
        yield from self._read_python_literal()
        literal = python_as_json("".join(self._held[first:]))
        if not literal:
            return False
        if name:
            self._begin_call(name)
        self._held.clear()
        self._argue(start + literal)
        return True

    def _stream_python_string(self, quote: str) -> Generator[None, str, bool]:
        """Read a string into the last call's arguments, as it is written; False if the text ends first."""
        self._character = yield
        while self._character and self._character != quote:
            if self._character == "\\":
                escape = yield from self._read_python_escape()
                self._argue(unescape(escape))
            else:
                self._argue(escape_text(self._character))
                self._character = yield
        if not self._character:
            return False
        self._argue('"')
        self._character = yield
        return True

    def _read_python_escape(self) -> Generator[None, str, str]:
        """Read an escape in a string, as far as it goes."""
        escape = self._character
        self._character = yield
        kind = self._character
        length = {"x": 2, "u": 4, "U": 8}.get(kind, 0)
        digits = string.hexdigits
        if kind in _OCTAL:
            length = 2
            digits = _OCTAL
        escape += kind
        if kind:
            self._character = yield
        while length and self._character and self._character in digits:
            escape += self._character
            self._character = yield
            length -= 1
        return escape

    def _read_python_literal(self) -> _Reading:
        """Read what stands before the comma or the bracket that ends an argument."""
        depth = 0
        quote = ""
        while self._character and (quote or depth or self._character not in ",)"):
            character = self._character
            if quote:
                quote = "" if character == quote else quote
            elif character in ("'", '"'):
                quote = character
            else:
                depth += (character in "[{(") - (character in ")}]")
            yield from self._next()
            if quote and character == "\\":
                yield from self._next()
            if depth < 0:
                return

    # ---- calls and reasoning as messages

    def _read_messages(self, form: CallForm) -> _Reading:
        """Messages with channels, such as `<|channel|>analysis<|message|>...<|end|>`.

        The last one is a call, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or
        of the channel final. Special tokens are in the text.
        """
        self._character = yield
        while True:
            yield from self._pass_on(("<",), self._say)
            mark = yield from self._read_word(*form.begins)
            while mark in form.begins:
                write = yield from self._read_head(mark)
                mark = ""
                if write is not None:
                    mark = yield from self._read_body(form, write)
            self._release()

    def _read_body(self, form: CallForm, write: Callable[[str], None]) -> Generator[None, str, str]:
        """Read a message's text up to a mark: the mark."""
        mark = ""
        self._is_reasoning = write == self._think
        while not mark:
            self._release(write)
            yield from self._pass_on(("<",), write)
            mark = yield from self._read_word(*form.ends, *form.begins)
        self._is_reasoning = False
        if mark in form.ends:
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


def _starts_of(form: CallForm | None) -> tuple[str, ...]:
    """The marks with which calls may begin: those of their group, and that of a call without its group's."""
    if form is None:
        return ()
    start = form.syntax.start if isinstance(form.syntax, NamedCalls | TaggedCalls) else ""
    return (*form.begins, start) if start else form.begins


def _unquote(body: str) -> str:
    """The text of a string of JSON, given without its quotes; as it is where a model has made up an escape."""
    try:
        text: str = json.loads(f'"{body}"', strict=False)
    except ValueError:
        return body
    return text
