"""Grammars of strangers are tried in a process of their own, which bounds end and nobody else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from coordinator.requests.grammars import CheckedGrammars
from tandem.errors import InvalidRequestError
from tandem.grammar import Grammars
from tandem.types import Grammar, GrammarKind
from tests.paths import DEMO_TARGET

SLOW = (
    "\n".join(f'r{i} ::= r{i + 1} | "x" r{i + 1} "y"' for i in range(3000)) + '\nr3000 ::= "a"\nroot ::= r0'
)
"""The library takes minutes for it, and no limit of its own stops it sooner."""
DIVISIBLE = json.dumps({"type": "integer", "multipleOf": 1000003})
"""Half a minute."""


@pytest.fixture
def grammars() -> Iterator[CheckedGrammars]:
    made = CheckedGrammars(Grammars((DEMO_TARGET / "tokenizer.json").read_text, 2048, [0]))
    yield made
    made.close()


@pytest.mark.parametrize(
    "hostile", [Grammar(GrammarKind.GRAMMAR, SLOW), Grammar(GrammarKind.JSON_SCHEMA, DIVISIBLE)]
)
async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(
    grammars: CheckedGrammars, hostile: Grammar
) -> None:
    for _ in range(2):  # the second time without trying
        began = time.process_time()
        with pytest.raises(
            InvalidRequestError, match=r"cannot be used: it (takes more than 2 s|was not done within 30 s)"
        ):
            await grammars.open(hostile)
        assert time.process_time() - began < 2.0, "not in this process"
    state = await grammars.open(Grammar(GrammarKind.CHOICE, '["a"]'))
    assert state.follow([])


async def test_a_refusal_of_the_library_is_passed_on(grammars: CheckedGrammars) -> None:
    for kind, source, reason in (
        (GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}', "Unimplemented keys"),
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.GRAMMAR, "root ::= " + "(" * 5000, "recursion"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            await grammars.open(Grammar(kind, source))
