"""Calls of tools and reasoning are read however the text is cut, and nothing of it is lost."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_coordinator.parsers.forms import CALL_FORMS, DEMANDED, REASONING_FORMS, ReasoningForm, call_form
from tandem_coordinator.parsers.reader import CompletionReader, Said

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
    # Forms that are not read, and texts that are no calls
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
    return reader, Said("".join(each.content for each in said), "".join(each.reasoning for each in said))


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
        reader, found = read(form, pieces)
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
    options = {"reasoning": thoughts, "has_begun": has_begun}
    reader, whole = read(form, [text], **options)
    streamed_reader, streamed = read(form, cut(text, data.draw(st.lists(st.integers(0, 500)))), **options)
    assert (streamed, called(streamed_reader)) == (whole, called(reader))
    if not reader.calls and thoughts is None and form != "openai":
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
    "llama3_json": ("<|python_tag|>{}", "\n", True),
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


def test_reasoning_is_told_from_text() -> None:
    text = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for pieces in ([text], list(text)):
        assert read("openai", pieces)[1] == Said("Yes.", "Hm <b>.")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|channel|>final<|message|>", "openai"),
        ("plain", "hermes"),
    ],
)
def test_a_template_tells_its_form(template: str, form: str) -> None:
    assert call_form("auto", template) is FORMS[form]
