"""Calls of tools: read out of every form of text however it is cut, and demanded by a grammar of their parameters."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from coordinator.http.tools import CallReader, Parser, demanded, functions_of, parser_of, readable
from tandem.grammar import Grammars
from tests.paths import DEMO_TARGET
from tests.unit.tandem.test_grammar import tokens_of

ODD = '{"a": "x}\\"{</tool_call>", "b": [1, {"c": 2}]}'
TEXTS: list[tuple[Any, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "get", "arguments": {ODD}}}\n</tool_call>', "Sure.\n", [("get", ODD)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"name":"g","arguments":{"x":1}}\n</tool_call>',
        "",
        [("f", "{}"), ("g", '{"x":1}')],
    ),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("llama3", '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"name": "g", "parameters": {"a": 1}}; {"name": "h"}', "",
        [("g", '{"a": 1}'), ("h", "{}")]),
    ("llama3", '{"no": 1} and more', '{"no": 1} and more', []),
    ("llama3", '{"unfinished', '{"unfinished', []),
    ("llama3", "It is {so}.", "It is {so}.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"q": "ü"}}]', "", [("a", '{"q": "ü"}')]),
    ("mistral", ' [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', "", [("a", "{}"), ("b", "{}")]),
    ("mistral", "[1] says", "[1] says", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think < of |> it.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"a": "<|"}',
        "",
        [("get", '{"a": "<|"}')],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>First: <|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "First: ",
        [("f", "{}")],
    ),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b <|c", "b <|c",
        []),
    ("harmony", "no message", "no message", []),
    ("demanded", '[{"name": "a", "arguments": {"q": {}}}]', "", [("a", '{"q": {}}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_read_however_the_text_is_cut(
    form: Parser, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in cuts:
        reader = CallReader(form)
        found = "".join(reader.read(piece)[0] for piece in pieces) + reader.finish()
        assert (found, [(call.name, call.arguments) for call in reader.calls]) == (content, calls), pieces


def test_arguments_are_streamed_as_they_are_written() -> None:
    reader = CallReader("hermes")
    deltas = list(itertools.chain(*(reader.read(character)[1] for character in TEXTS[0][1])))
    first, *others = deltas
    assert first["function"] == {"name": "get", "arguments": ""}
    assert first["id"].startswith("call_")
    assert all(delta.keys() == {"index", "function"} for delta in others)
    assert "".join(delta["function"]["arguments"] for delta in others) == ODD
    assert len(others) > 10


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


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/digit"}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
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


def test_arguments_reach_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = readable({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    odd = {**call, "function": {"name": "f", "arguments": "{"}}
    assert readable({"role": "assistant", "tool_calls": [odd, 5]})["tool_calls"] == [odd, 5]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}  # type: ignore[index]


def test_reasoning_is_told_from_text() -> None:
    text = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for pieces in ([text], list(text)):
        reader = CallReader("harmony")
        assert "".join(reader.read(piece)[0] for piece in pieces) + reader.finish() == "Yes."
        assert reader.reasoning == "Hm <b>."
