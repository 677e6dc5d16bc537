"""Calls of tools are read however the text is cut, and nothing of it is lost; demanded calls are bound by a grammar."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.model.grammar import Grammars
from tandem_coordinator.http.tools import CallReader, Parser, Said, demanded, functions_of, parser_of
from tests.paths import DEMO_TARGET
from tests.unit.tandem.test_grammar import tokens_of

ODD = '{"a": "x}\\"{</tool_call>", "b": [1, {"c": 2}]}'
F = '{"name": "f", "arguments": {}}'
QWEN_CODER = "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
SEARCH = "<|channel|>commentary to=browser.search<|message|>{}"
MISTRAL_11 = '[TOOL_CALLS]f[ARGS]{"city": "Oslo"}'
TEXTS: list[tuple[Any, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "get", "arguments": {ODD}}}\n</tool_call>', "Sure.\n", [("get", ODD)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"name":"g","arguments":{"x":1}}\n</tool_call>', "", [("f", "{}"), ("g", '{"x":1}')]),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", '<tool_call>{"\\q": 1, "name": "f\\q", "arguments": {"\\q": "\\q"}}</tool_call>', '"\\q": 1',
        [("f\\q", '{"\\q": "\\q"}')]),
    ("llama3", '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"name": "g", "parameters": {"a": 1}}; {"name": "h"}', "",
        [("g", '{"a": 1}'), ("h", "{}")]),
    ("llama3", '{"no": 1} and more', '{"no": 1} and more', []),
    ("llama3", '{"unfinished', '{"unfinished', []),
    ("llama3", "It is {so}.", "It is {so}.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"q": "ü"}}]', "", [("a", '{"q": "ü"}')]),
    ("mistral", ' [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', "", [("a", "{}"), ("b", "{}")]),
    ("mistral", "[1] says", "[1] says", []),
    ("harmony", "<|channel|>analysis<|message|>Think < of |> it.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"a": "<|"}', "", [("get", '{"a": "<|"}')]),
    ("harmony", "<|channel|>commentary<|message|>First: <|end|><|start|>assistant to=functions.f<|channel|>commentary "
        "json<|message|>{}<|call|>", "First: ", [("f", "{}")]),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b <|c", "b <|c",
        []),
    ("harmony", "no message", "no message", []),
    ("demanded", '[{"name": "a", "arguments": {"q": {}}}]', "", [("a", '{"q": {}}')]),
    # Members by key, in any order
    ("hermes", '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "f"}\n</tool_call>', "",
        [("f", '{"city": "Oslo"}')]),
    ("hermes", f'<tool_call>{{"arguments": {ODD}, "type": "function", "name": "f", "id": "1"}}</tool_call>', "",
        [("f", ODD)]),
    ("llama3", '{"parameters": {"a": 1}, "type": "function", "name": "f"}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "f", "id": "abc"}]', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"thought": "Oslo?", "name": "f", "arguments": {}, "sure": true}</tool_call>',
        '"thought": "Oslo?""sure": true', [("f", "{}")]),
    # Forms that are not read, and texts that are no calls
    ("hermes", QWEN_CODER, QWEN_CODER, []),
    ("hermes", GLM, GLM, []),
    ("mistral", MISTRAL_11, MISTRAL_11, []),
    ("mistral", f"Let me see. {MISTRAL_11}", f"Let me see. {MISTRAL_11}", []),
    ("llama3", '<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
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
    ("llama3", f"{F}; {F}; then?", "; then?", [("f", "{}"), ("f", "{}")]),
    ("demanded", f"<think>\nWhich [{F}]?\n</think>\n\n[{F}]", f"<think>\nWhich [{F}]?\n</think>", [("f", "{}")]),
    ("harmony", SEARCH, SEARCH, []),
    ("harmony", "<|start|>user<|message|>Hi<|end|>", "<|start|>user<|message|>Hi<|end|>", []),
    ("harmony", "<|channel|>final<|message|>a<|end|>between<|start|>assistant<|channel|>final<|message|>b",
        "abetweenb", []),
    ("harmony", "<|channel|>final<|message|>a<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}", "a",
        [("f", "{}")]),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assis", "a<|start|>assis", []),
]  # fmt: skip


FORMS: list[Any] = [*get_args(Parser), "demanded"]


def read(form: Parser, pieces: list[str]) -> tuple[CallReader, Said]:
    """Reads a text that comes in pieces."""
    reader = CallReader(form)
    said = [reader.read(piece, is_last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    return reader, Said("".join(each.content for each in said), "".join(each.reasoning for each in said))


def called(reader: CallReader) -> list[tuple[str, str]]:
    """Names and arguments of the calls that were read."""
    return [
        (function["name"], function["arguments"]) for function in (call["function"] for call in reader.calls)
    ]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_read_however_the_text_is_cut(
    form: Parser, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in cuts:
        reader, found = read(form, pieces)
        assert found.content == content, pieces
        assert called(reader) == calls, pieces


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</think>", "<|start|>assistant",
    "<|channel|>final", "<|channel|>analysis", "<|channel|>commentary",
    " to=functions.", "<|constrain|>json", "<|message|>", "<|end|>",
    "<|call|>", F, '{"name": ', '"name": "', '"arguments": ', '{"', '"', ": ", "{", "}", "[", "]", ", ", ";", "\\",
    " ", "\n", '"type": "function"',
]  # fmt: skip
FRAGMENTS = st.one_of(
    st.sampled_from(MARKS),
    st.sampled_from(MARKS).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda end: mark[:end])),
    st.just("WORD"),
)
WORD = re.compile(r"word\d+;")


def numbered(fragments: list[str]) -> str:
    """A text of fragments in which each word occurs once."""
    numbers = itertools.count(1)
    return "".join(f"word{next(numbers)};" if each == "WORD" else each for each in fragments)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@settings(max_examples=1500, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    fragments=st.lists(FRAGMENTS, max_size=30),
    places=st.lists(st.integers(0, 500)),
)
def test_no_text_is_lost(form: Any, fragments: list[str], places: list[int]) -> None:
    text = numbered(fragments)
    reader, whole = read(form, [text])
    streamed_reader, streamed = read(form, cut(text, places))
    assert (streamed, called(streamed_reader)) == (whole, called(reader))
    if not reader.calls and form != "harmony":
        assert whole.content == text
    if not reader.calls and not re.search(r"<\|message\|>", text):
        assert whole.content == text
    held = [whole.content, whole.reasoning, *itertools.chain(*called(reader))]
    assert sorted(WORD.findall(" ".join(held))) == sorted(WORD.findall(text))


PROSE = st.text(st.sampled_from("ab .,:;!?\n()'ü€"), min_size=1, max_size=20).filter(str.strip)
ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.text(max_size=9) | st.integers() | st.lists(st.booleans()), max_size=3
)


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[tuple[str, str], str]:
    """A call's name and arguments, and the object that a model writes for it."""
    name = draw(st.text(min_size=1, max_size=8))
    arguments = json.dumps(draw(ARGUMENTS), indent=draw(st.sampled_from([None, 1])))
    members = [f'"name": {json.dumps(name)}', f'"arguments": {arguments}']
    if draw(st.booleans()):
        members.append('"type": "function"')
    return (name, arguments), f"{{{', '.join(draw(st.permutations(members)))}}}"


AROUND: dict[Any, tuple[str, str, bool]] = {
    "hermes": ("<tool_call>\n{}\n</tool_call>", "\n", True),
    "mistral": ("[TOOL_CALLS] [{}]", "\n", True),
    "llama3": ("<|python_tag|>{}", "\n", True),
    "demanded": ("[{}]", "", False),
}
"""By form: how a call is marked, what stands between two, and whether text may stand before the first."""


@pytest.mark.parametrize("form", [*AROUND])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PROSE | written_calls(), max_size=6), places=st.lists(st.integers(0, 2000)))
def test_calls_and_content_are_told_apart(form: Any, parts: list[Any], places: list[int]) -> None:
    mark, between, has_text_before = AROUND[form]
    if not has_text_before:
        parts = sorted(parts, key=lambda part: isinstance(part, str))[:2]
    text, content = "", ""
    follows_call = False
    for part in parts:
        if isinstance(part, str):
            text += part
            content += part
        else:
            text += (between if follows_call else "") + mark.format(part[1])
        follows_call = not isinstance(part, str)
    calls = [part[0] for part in parts if not isinstance(part, str)]
    if not has_text_before and len(calls) > 1:
        return
    for pieces in ([text], cut(text, places)):
        reader, found = read(form, pieces)
        assert (found.content, called(reader)) == (content, calls)


def test_harmony_calls_nothing_without_tools() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    reader = CallReader("harmony", may_call=False)
    assert reader.read(text, is_last=True).content == text
    assert not reader.calls


def test_arguments_are_streamed_as_they_are_written() -> None:
    reader = CallReader("hermes")
    deltas = list(itertools.chain(*(reader.read(character).calls or [] for character in TEXTS[0][1])))
    first, *others = deltas
    assert first["function"]["name"] == "get"
    assert first["id"].startswith("call_")
    assert all(delta.keys() == {"index", "function"} for delta in others)
    assert "".join(delta["function"]["arguments"] for delta in deltas) == ODD
    assert len(others) > 10


def test_reasoning_is_told_from_text() -> None:
    text = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for pieces in ([text], list(text)):
        assert read("harmony", pieces)[1] == Said("Yes.", "Hm <b>.")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<|channel|>final<|message|>", "harmony"),
        ("plain", "hermes"),
    ],
)
def test_a_template_tells_its_form(template: str, form: str) -> None:
    assert parser_of(template) == form


ONE_DIGIT = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
FUNCTIONS = {"name": "add", "parameters": ONE_DIGIT}, {"name": "now"}
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
ADD, NOW = '{"name": "add", "arguments": {"a": 5}}', '{"name": "now", "arguments": {}}'
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("choice", "parallel", "accepted", "refused"),
    [
        ("required", True, [f"[{ADD}]", f"[{NOW}, {ADD}]"], ["[]", f"[{ADD.replace('5', '12')}]", ADD]),
        ("required", False, [f"[{NOW}]"], [f"[{NOW}, {ADD}]"]),
        (NAMED, True, [f"[{ADD}]"], [f"[{NOW}]", f"[{ADD}, {ADD}]"]),
    ],
)
def test_demands_are_bound(choice: Any, parallel: bool, accepted: list[str], refused: list[str]) -> None:
    grammar = demanded(choice, functions_of(TOOLS), parallel=parallel)
    assert grammar is not None
    state = Grammars((DEMO_TARGET / "tokenizer.json").read_text, 2048, [0]).compiled(grammar)
    for text in accepted:
        assert state.follow(tokens_of(text))
        assert state.accepts
        reader = CallReader("demanded")
        reader.read(text)
        assert reader.calls
    for text in refused:
        assert not (state.follow(tokens_of(text)) and state.accepts)


def test_definitions_of_another_type_are_left_to_the_grammar() -> None:
    assert demanded("required", {"f": {"parameters": {"$defs": [1]}}}, parallel=True) is not None
