"""Calls of tools and reasoning are read however the text is cut, and nothing of it is lost."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_coordinator.parsers.forms import CALL_FORMS, DEMANDED, REASONING_FORMS, ReasoningForm
from tandem_coordinator.parsers.reader import CompletionReader, Said

ODD = '{"a": "x}\\"{</tool_call>", "b": [1, {"c": 2}]}'
F = '{"name": "f", "arguments": {}}'
QWEN_CODER = "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
SEARCH = "<|channel|>commentary to=browser.search<|message|>{}"
BEGIN, SEP, END = (f"<｜tool▁{words}｜>" for words in ("call▁begin", "sep", "call▁end"))
DEEPSEEK_3 = f"{BEGIN}function{SEP}f\n```json\n{ODD}\n```{END}"
DEEPSEEK_31 = f"{BEGIN}f{SEP}{ODD}{END}"
CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FUNCTIONS = {
    "f": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}, "text": {"type": "string"}}}}
}
TEXTS: list[tuple[Any, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "get", "arguments": {ODD}}}\n</tool_call>', "Sure.\n", [("get", ODD)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"name":"g","arguments":{"x":1}}\n</tool_call>', "", [("f", "{}"), ("g", '{"x":1}')]),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", '<tool_call>{"\\q": 1, "name": "f\\q", "arguments": {"\\q": "\\q"}}</tool_call>', '"\\q": 1',
        [("f\\q", '{"\\q": "\\q"}')]),
    ("llama3_json", '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {"a": 1}}; {"name": "h"}', "",
        [("g", '{"a": 1}'), ("h", "{}")]),
    ("llama3_json", '{"no": 1} and more', '{"no": 1} and more', []),
    ("llama3_json", '{"unfinished', '{"unfinished', []),
    ("llama3_json", "It is {so}.", "It is {so}.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"q": "ü"}}]', "", [("a", '{"q": "ü"}')]),
    ("mistral", ' [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', "", [("a", "{}"), ("b", "{}")]),
    ("mistral", "[1] says", "[1] says", []),
    ("openai", "<|channel|>analysis<|message|>Think < of |> it.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"a": "<|"}', "", [("get", '{"a": "<|"}')]),
    ("openai", "<|channel|>commentary<|message|>First: <|end|><|start|>assistant to=functions.f<|channel|>commentary "
        "json<|message|>{}<|call|>", "First: ", [("f", "{}")]),
    ("openai", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b <|c", "b <|c",
        []),
    ("openai", "no message", "no message", []),
    ("demanded", '[{"name": "a", "arguments": {"q": {}}}]', "", [("a", '{"q": {}}')]),
    # Members by key, in any order
    ("hermes", '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "f"}\n</tool_call>', "",
        [("f", '{"city": "Oslo"}')]),
    ("hermes", f'<tool_call>{{"arguments": {ODD}, "type": "function", "name": "f", "id": "1"}}</tool_call>', "",
        [("f", ODD)]),
    ("llama3_json", '{"parameters": {"a": 1}, "type": "function", "name": "f"}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "f", "id": "abc"}]', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"thought": "Oslo?", "name": "f", "arguments": {}, "sure": true}</tool_call>',
        '"thought": "Oslo?""sure": true', [("f", "{}")]),
    # A name, and then an object
    ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "Oslo"}', "", [("f", '{"city": "Oslo"}')]),
    ("mistral", f"I ask. [TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{ODD}[TOOL_CALLS]g{{}} So.", "I ask.  So.",
        [("f", ODD), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS] is a mark, f[ARGS]{}", "[TOOL_CALLS] is a mark, f[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]f[ARGS]nothing", "[TOOL_CALLS]f[ARGS]nothing", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "b', "", [("f", '{"a": "b')]),
    ("deepseek_v3", f"So: {CALLS.format(DEEPSEEK_3 + DEEPSEEK_3)}", "So: ", [("f", ODD), ("f", ODD)]),
    ("deepseek_v3", f"{DEEPSEEK_3} So.", " So.", [("f", ODD)]),
    ("deepseek_v3", CALLS.format(DEEPSEEK_31), CALLS.format(DEEPSEEK_31), []),
    ("deepseek_v31", f"So: {CALLS.format(DEEPSEEK_31 + DEEPSEEK_31)}", "So: ", [("f", ODD), ("f", ODD)]),
    ("deepseek_v31", f"{CALLS.format(DEEPSEEK_31)}Then.", "Then.", [("f", ODD)]),
    ("deepseek_v31", CALLS.format(f"{BEGIN}f{SEP}no{END}"), CALLS.format(f"{BEGIN}f{SEP}no{END}"), []),
    # A list, with another mark or none
    ("granite", f"<|tool_call|>[{F}, {F}]", "", [("f", "{}"), ("f", "{}")]),
    ("granite", f"<tool_call>[{F}]", "", [("f", "{}")]),
    ("granite", f"[{F}]", "", [("f", "{}")]),
    ("phi4_mini_json", f"functools[{F}, {F}]", "", [("f", "{}"), ("f", "{}")]),
    ("phi4_mini_json", f"I see. <|tool_call|>[{F}]<|/tool_call|>", "I see. ", [("f", "{}")]),
    ("phi4_mini_json", "functools.partial is of functools", "functools.partial is of functools", []),
    # Tagged values
    ("qwen3_coder", f"I see.\n{QWEN_CODER}\n", "I see.\n", [("f", '{"city": "Oslo"}')]),
    ("qwen3_coder", f"{QWEN_CODER}\n{QWEN_CODER} Well.", " Well.", [("f", '{"city": "Oslo"}')] * 2),
    ("qwen3_coder", "<function=f>\n</function>", "", [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=b>\n[1, 2]\n</parameter></function>"
        "<function=g></function></tool_call>", "", [("f", '{"a": 1, "b": [1, 2]}'), ("g", "{}")]),
    ("qwen3_coder", '<tool_call><function=f><parameter=text>\n\n"</x>\n</param\n</parameter>\n</function>', "",
        [("f", '{"text": "\\n\\"</x>\\n</param"}')]),
    ("qwen3_coder", "<tool_call><function=f> so</function>", "<tool_call><function=f> so</function>", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\n1\n</parameter> so</function>", " so</function>",
        [("f", '{"a": 1}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>\nOs</para", "", [("f", '{"text": "Os</para')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\n1", "", [("f", '{"a": 1')]),
    ("qwen3_coder", f"<tool_call>{F}</tool_call>", f"<tool_call>{F}</tool_call>", []),
    ("glm45", f"I see.{GLM}{GLM}", "I see.", [("f", '{"city": "Oslo"}')] * 2),
    ("glm45", "<tool_call>f\n</tool_call>\n<tool_call>g</tool_call>", "", [("f", "{}"), ("g", "{}")]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>True</arg_value><arg_key>text</arg_key>"
        "<arg_value> 5 < 6 </arg_value></tool_call>", "", [("f", '{"a": true, "text": " 5 < 6 "}')]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "", [("f", '{"a": 1}')]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key> 1", "<tool_call>f\n<arg_key>a</arg_key> 1", []),
    ("glm45", f"<tool_call>{F}</tool_call>", f"<tool_call>{F}</tool_call>", []),
    ("glm45", "<tool_call>one <tool_call>f</tool_call>", "<tool_call>one ", [("f", "{}")]),
    # Python
    ("pythonic", "[f(city='Oslo', days=3), g()]", "", [("f", '{"city": "Oslo", "days": 3}'), ("g", "{}")]),
    ("pythonic", "<|python_start|>[a.b(x=[1, (2, {'k': None})], y=-1.5e3,)]<|python_end|>", "",
        [("a.b", '{"x": [1, [2, {"k": null}]], "y": -1.5e3}')]),
    ("pythonic", """[f(a='it\\'s "\\x41\\n\\ud83d\\ude00\\q', b="'")]""", "",
        [("f", '{"a": "it\'s \\"A\\n\\ud83d\\ude00\\\\q", "b": "\'"}')]),
    ("pythonic", "[f(a=1, b=some)] or so", ", b=some)] or so", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a=1)", "", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a='Os", "", [("f", '{"a": "Os')]),
    ("pythonic", "[f(a=1, b='Os", "", [("f", '{"a": 1, "b": "Os')]),
    ("pythonic", "[f(a=1, b=", ", b=", [("f", '{"a": 1}')]),
    ("pythonic", "[f(x)]", "[f(x)]", []),
    ("pythonic", "[f() is called", "[f() is called", []),
    ("pythonic", "[here](https://a.example)", "[here](https://a.example)", []),
    ("pythonic", "See [f(a=1)]", "See [f(a=1)]", []),
    # Forms of others, and texts that are no calls
    ("hermes", QWEN_CODER, QWEN_CODER, []),
    ("hermes", GLM, GLM, []),
    ("llama3_json", '<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("mistral", '[{"name": "Bob"}, {"name": "Eve"}]', '[{"name": "Bob"}, {"name": "Eve"}]', []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"arguments": {"a": 1}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": }', '<tool_call>{"name": "f", "arguments": }', []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("demanded", '[{"name": "f", "arg', '[{"name": "f", "arg', []),
    # Text around calls, behind broken ones, and where the completion was cut
    ("hermes", f'<tool_call>x<tool_call>{F}</tool_call>\n\nDone. \n', "<tool_call>x\n\nDone. \n", [("f", "{}")]),
    ("hermes", f"<tool_call><tool_call>{F}\n<tool_call>{F} \n", "<tool_call>", [("f", "{}"), ("f", "{}")]),
    ("hermes", f"<tool_call>{F} or so</tool_call>", " or so</tool_call>", [("f", "{}")]),
    ("hermes", f"<tool_call>[{F}, {F}]</tool_call>", "", [("f", "{}"), ("f", "{}")]),
    ("hermes", f"<tool_call>[{F}, no]</tool_call>", ", no]</tool_call>", [("f", "{}")]),
    ("hermes", f"<tool_call>{F}</tool", "</tool", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}', ', "name": "g"}', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}', ', "parameters": {}}', [("f", "{}")]),
    ("mistral", f"I ask. [TOOL_CALLS] [{F}] So.", "I ask.  So.", [("f", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{F}]\n[TOOL_CALLS] [{F}]", "", [("f", "{}"), ("f", "{}")]),
    ("llama3_json", f"{F}; {F}; then?", "; then?", [("f", "{}"), ("f", "{}")]),
    ("demanded", f"<think>\nWhich [{F}]?\n</think>\n\n[{F}]", f"<think>\nWhich [{F}]?\n</think>", [("f", "{}")]),
    ("openai", SEARCH, SEARCH, []),
    ("openai", "<|start|>user<|message|>Hi<|end|>", "<|start|>user<|message|>Hi<|end|>", []),
    ("openai", "<|channel|>final<|message|>a<|end|>between<|start|>assistant<|channel|>final<|message|>b",
        "abetweenb", []),
    ("openai", "<|channel|>final<|message|>a<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}", "a",
        [("f", "{}")]),
    ("openai", "<|channel|>final<|message|>a<|end|><|start|>assis", "a<|start|>assis", []),
]  # fmt: skip


FORMS = {"demanded": DEMANDED} | {form.names[0]: form for form in CALL_FORMS}
"""By the first of their names."""


def read(
    form: str | None,
    pieces: list[str],
    *,
    reasoning: ReasoningForm | None = None,
    has_begun: bool | None = False,
    functions: dict[str, Any] | None = None,
) -> tuple[CompletionReader, Said]:
    """Reads a text that comes in pieces."""
    calls = None if form is None else FORMS[form]
    reader = CompletionReader(calls, reasoning, has_begun_reasoning=has_begun, functions=functions)
    said = [reader.read(piece, is_last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    assert whole_calls(delta for each in said for delta in each.calls or ()) == reader.calls
    return reader, Said("".join(each.content for each in said), "".join(each.reasoning for each in said))


def whole_calls(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that a client puts together from a stream's deltas."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        function = delta["function"]
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": function})
        else:
            calls[-1]["function"]["arguments"] += function["arguments"]
        assert delta["index"] == len(calls) - 1
    return calls


def called(reader: CompletionReader) -> list[tuple[str, str]]:
    """Names and arguments of the calls that were read."""
    return [
        (function["name"], function["arguments"]) for function in (call["function"] for call in reader.calls)
    ]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_read_however_the_text_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in cuts:
        reader, found = read(form, pieces, functions=FUNCTIONS)
        assert found.content == content, pieces
        assert called(reader) == calls, pieces


COMMON = [
    F, '{"name": ', '"name": "', '"arguments": ', '{"', '"', ": ", "{", "}", "[", "]", ", ", ";", "\\", " ", "\n",
    '"type": "function"', "(", ")", "=", "'", "a=", "f(", "True", "1", ">",
    "\\n", "\\u00e9", "\\ud83d", "\N{GRINNING FACE}",
]  # fmt: skip
"""Parts of calls that have no mark of their form."""
HARMONY_HEADS = [
    "<|start|>assistant", "<|channel|>final", "<|channel|>analysis", "<|channel|>commentary", " to=functions.",
    "<|constrain|>json", "<|message|>",
]  # fmt: skip
REASONINGS = {form.names[0]: form for form in REASONING_FORMS}
WORD = re.compile(r"w\d+w")


@st.composite
def fragments(draw: st.DrawFn, marks: list[str]) -> str:
    """A text of marks, whole or cut, of parts of calls, and of words of which each occurs once."""
    parts = st.one_of(
        st.sampled_from(marks),
        st.sampled_from(marks).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda end: mark[:end])),
        st.sampled_from(COMMON),
        st.none(),
    )
    numbers = itertools.count(1)
    return "".join(
        f"w{next(numbers)}w" if part is None else part for part in draw(st.lists(parts, max_size=30))
    )


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize("reasoning", [None, *REASONINGS])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_is_lost_however_it_is_cut(form: str, reasoning: str | None, data: st.DataObject) -> None:
    thoughts = None if reasoning is None else REASONINGS[reasoning]
    has_begun = data.draw(st.sampled_from([False, True, None]))
    marks = [mark for mark in FORMS[form].marks if mark != "[CALL_ID]"]  # identifiers are left out
    marks += HARMONY_HEADS if form == "openai" else []
    marks += [] if thoughts is None else [*thoughts.starts, *thoughts.ends]
    text = data.draw(fragments(marks))
    options: Any = {"reasoning": thoughts, "has_begun": has_begun}
    reader, whole = read(form, [text], **options)
    streamed_reader, streamed = read(form, cut(text, data.draw(st.lists(st.integers(0, 500)))), **options)
    assert (streamed, called(streamed_reader)) == (whole, called(reader))
    if not reader.calls and thoughts is None and form != "openai":
        assert whole.content == text
    held = [whole.content, whole.reasoning, *itertools.chain(*called(reader))]
    assert sorted(WORD.findall(" ".join(held))) == sorted(WORD.findall(text))


PROSE = st.text(st.sampled_from("ab .,:;!?\n()'ü€"), min_size=1, max_size=20).filter(str.strip)
NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,7}", fullmatch=True)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
TEXTS_OF_ARGUMENTS = st.text(max_size=9) | st.text(st.sampled_from("\"'\\</>nx\n "), max_size=9)
VALUES = st.recursive(
    TEXTS_OF_ARGUMENTS
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
Call = tuple[str, dict[str, Any]]
CALL = st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3))


def as_object(call: Call, draw: Any) -> str:
    """The call as a JSON object with its members in any order."""
    name, arguments = call
    written = json.dumps(arguments, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
    members = [f'"name": {json.dumps(name)}', f'"arguments": {written}']
    if draw(st.booleans()):
        members.append('"type": "function"')
    return f"{{{', '.join(draw(st.permutations(members)))}}}"


def as_named(before: str, between: str, after: str = "") -> Callable[[Call, Any], str]:
    """Writes a call as its name and its arguments between marks."""
    return lambda call, draw: f"{before}{call[0]}{between}{json.dumps(call[1])}{after}"


def as_tagged(call: Call, value: Callable[[str, str], str], before: str, after: str) -> str:
    """The call with tagged arguments, of which only strings are plain text."""
    name, arguments = call
    values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
    return before.format(name) + "".join(value(key, each) for key, each in values.items()) + after


def as_python(call: Call, draw: Any) -> str:
    """The call in Python."""
    name, arguments = call
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|python_start|>[{name}({written})]<|python_end|>"


WRITERS: dict[str, Callable[[Call, Any], str]] = {
    "hermes": lambda call, draw: f"<tool_call>\n{as_object(call, draw)}\n</tool_call>",
    "mistral": lambda call, draw: f"[TOOL_CALLS] [{as_object(call, draw)}]",
    "mistral, version 11": as_named("[TOOL_CALLS]", "[ARGS]"),
    "llama3_json": lambda call, draw: f"<|python_tag|>{as_object(call, draw)}",
    "granite": lambda call, draw: f"<|tool_call|>[{as_object(call, draw)}]",
    "phi4_mini_json": lambda call, draw: f"functools[{as_object(call, draw)}]",
    "deepseek_v3": as_named(f"{BEGIN}function{SEP}", "\n```json\n", f"\n```{END}"),
    "deepseek_v31": as_named(BEGIN, SEP, END),
    "qwen3_coder": lambda call, draw: as_tagged(
        call,
        lambda key, value: f"<parameter={key}>\n{value}\n</parameter>\n",
        "<tool_call>\n<function={}>\n",
        "</function>\n</tool_call>",
    ),
    "glm45": lambda call, draw: as_tagged(
        call,
        lambda key, value: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "<tool_call>{}\n",
        "</tool_call>",
    ),
    "pythonic": as_python,
    "openai": as_named("<|start|>assistant<|channel|>commentary to=functions.", "<|message|>", "<|call|>"),
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_calls_and_content_are_told_apart(writer: str, data: st.DataObject) -> None:
    """Whatever a model of each form writes before, between and behind its calls."""
    form = writer.partition(",")[0]
    parts = data.draw(st.lists(PROSE | CALL, max_size=5))
    parts = [
        part if isinstance(part, str) else (f"{part[0]}{number}", part[1])
        for number, part in enumerate(parts)
    ]
    text = ""
    content = ""
    follows_call = False
    for part in parts:
        if isinstance(part, str):
            text += f"<|channel|>final<|message|>{part}<|end|>" if form == "openai" else part
            content += part
        else:
            text += ("\n" if follows_call and form != "openai" else "") + WRITERS[writer](part, data.draw)
        follows_call = not isinstance(part, str)
    calls = [part for part in parts if not isinstance(part, str)]
    functions = {name: {"parameters": parameters_of(arguments)} for name, arguments in calls}
    for pieces in ([text], cut(text, data.draw(st.lists(st.integers(0, 2000))))):
        reader, found = read(form, pieces, functions=functions)
        assert found.content == content
        assert [(name, json.loads(arguments)) for name, arguments in called(reader)] == calls


def parameters_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """A schema that tells strings from other values."""
    others = {"type": ["number", "boolean", "null", "array", "object"]}
    return {
        "properties": {
            key: {"type": "string"} if isinstance(value, str) else others for key, value in arguments.items()
        }
    }


def test_demanded_calls_begin_the_text() -> None:
    assert called(read("demanded", [f"[{F}, {F}]"])[0]) == [("f", "{}")] * 2


def test_harmony_calls_nothing_without_tools() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    reader = CompletionReader(FORMS["openai"], may_call=False)
    assert reader.read(text, is_last=True).content == text
    assert not reader.calls


def test_arguments_are_streamed_as_they_are_written() -> None:
    reader = CompletionReader(FORMS["hermes"])
    deltas = list(itertools.chain(*(reader.read(character).calls or [] for character in TEXTS[0][1])))
    first, *others = deltas
    assert first["function"]["name"] == "get"
    assert first["id"].startswith("call_")
    assert all(delta.keys() == {"index", "function"} for delta in others)
    assert "".join(delta["function"]["arguments"] for delta in deltas) == ODD
    assert len(others) > 10


def test_harmonys_analysis_is_reasoning() -> None:
    text = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for pieces in ([text], list(text)):
        assert read("openai", pieces)[1] == Said("Yes.", "Hm <b>.")


THOUGHTS: list[tuple[str, bool | None, str, str, str]] = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    ("qwen3", False, "\n<think>Hm", "Hm", ""),
    ("qwen3", False, "It is <think>.", "", "It is <think>."),
    ("qwen3", False, "<thing>", "", "<thing>"),
    ("qwen3", True, "Hm. </thin </think>Yes </think>", "Hm. </thin ", "Yes </think>"),
    ("qwen3", True, "\n<think>Hm.</think>Yes", "Hm.", "Yes"),
    ("qwen3", True, "\n</think>Yes", "", "Yes"),
    ("qwen3", False, "<think></think>Yes", "", "Yes"),
    ("qwen3", None, "<think>Hm.</think>", "", "<think>Hm.</think>"),
    ("mistral", False, "[THINK]Hm[/TH.[/THINK]Yes", "Hm[/TH.", "Yes"),
    ("granite", False, "Here's my thought process: Hm. Here is my response: Yes", " Hm. ", " Yes"),
    ("seed_oss", False, "<seed:think>Hm.</seed:think>Yes", "Hm.", "Yes"),
    ("openai_gptoss", False, "<think>Hm.</think>", "", "<think>Hm.</think>"),
]
"""By form: whether the completion begins inside its reasoning, its text, the reasoning, and the content."""


@pytest.mark.parametrize("form", [None, "hermes", "pythonic"])
@pytest.mark.parametrize(("reasoning", "has_begun", "text", "thought", "content"), THOUGHTS)
def test_reasoning_is_told_from_content(
    form: str | None, reasoning: str, has_begun: bool | None, text: str, thought: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        found = read(form, pieces, reasoning=REASONINGS[reasoning], has_begun=has_begun)[1]
        assert found == Said(content, thought), pieces


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    ("form", "mention", "call"),
    [
        ("demanded", f"[{F}]", f"[{F}]"),
        ("pythonic", "[f()]", "[f()]"),
        ("mistral", f"[{F}]", f"[{F}]"),
        ("hermes", "a <tool_call>", f"<tool_call>{F}</tool_call>"),
        ("glm45", "the <tool_call> tag", "<tool_call>f</tool_call>"),
    ],
)
def test_calls_follow_reasoning(form: str, mention: str, call: str, has_begun: bool) -> None:
    start = "" if has_begun else "<think>"
    text = f"{start}Perhaps {mention}.</think>\n\n{call}"
    for pieces in ([text], list(text)):
        reader, found = read(form, pieces, reasoning=REASONINGS["qwen3"], has_begun=has_begun)
        assert found == Said("", f"Perhaps {mention}.")
        assert called(reader) == [("f", "{}")]


def test_a_call_ends_reasoning_whose_mark_is_missing() -> None:
    text = f"<think>I ask.\n<tool_call>{F}</tool_call> So. </think>"
    for pieces in ([text], list(text)):
        reader, found = read("hermes", pieces, reasoning=REASONINGS["qwen3"])
        assert found == Said(" So. </think>", "I ask.\n")
        assert called(reader) == [("f", "{}")]


@pytest.mark.parametrize("form", [*FORMS])
def test_the_work_is_linear(form: str) -> None:
    """Each character is looked at a bounded number of times, in texts that keep the reader in doubt."""
    marks = [*FORMS[form].marks, *REASONINGS["qwen3"].starts, "[", "{", "f(a="]
    for mark in marks:
        for part in (mark, mark[:-1], f"{mark}[", f'{mark}f{{"a": '):
            counts = []
            for length in (50, 200):
                reader = CompletionReader(FORMS[form], REASONINGS["qwen3"])
                counts.append(_count_steps(lambda: reader.read(part * length, is_last=True)))  # noqa: B023
            assert counts[1] <= 4.1 * counts[0], part


def _count_steps(work: Callable[[], object]) -> int:
    """Lines of the reader's code that this takes, which grow with the work, whatever the machine."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != CompletionReader.read.__code__.co_filename:
            return None
        steps += 1
        return count

    gc.disable()  # it would end the generators of earlier readers
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
        gc.enable()
    return steps
