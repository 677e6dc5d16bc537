"""Calls that a request demands are bound by a grammar, which the reader of completions understands."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.model.grammar import Grammars
from tandem_coordinator.http.tools import demanded, functions_of
from tandem_coordinator.parsers.forms import DEMANDED
from tandem_coordinator.parsers.reader import CompletionReader
from tests.paths import DEMO_TARGET
from tests.unit.tandem.test_grammar import tokens_of

ONE_DIGIT = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
FUNCTIONS = {"name": "add", "parameters": ONE_DIGIT}, {"name": "now"}
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
ADD = '{"name": "add", "arguments": {"a": 5}}'
NOW = '{"name": "now", "arguments": {}}'
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
        reader = CompletionReader(DEMANDED)
        reader.read(text)
        assert reader.calls
    for text in refused:
        assert not (state.follow(tokens_of(text)) and state.accepts)


def test_definitions_of_another_type_are_left_to_the_grammar() -> None:
    assert demanded("required", {"f": {"parameters": {"$defs": [1]}}}, parallel=True) is not None
