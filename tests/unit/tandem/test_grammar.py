"""Masks are those of the tokens before them, however a state came there; grammars of strangers are bounded."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tandem.errors import InvalidRequestError
from tandem.model.grammar import Grammars, known_tokens
from tandem.model.types import Grammar, GrammarKind
from tandem_coordinator.requests.grammars import CheckedGrammars
from tests.paths import DEMO_TARGET
from tests.unit.tandem.tiny_grammars import (
    EOS,
    TEXTS,
    THINK,
    THOUGHT,
    VOCABULARY_SIZE,
    allowed_by,
    ids_in,
    state_of,
    text_of,
    tiny_grammars,
)

WORDS = ("abc", "ab", "bac", "bcab", "cc", "abcabcabc", "aab")
ALL = set(range(VOCABULARY_SIZE))
TOKENS = st.lists(st.integers(0, len(TEXTS) - 1), max_size=5)


def prefixes(length: int) -> list[tuple[int, ...]]:
    """All sequences of up to so many tokens that begin one of the words."""
    return [
        tokens
        for count in range(length + 1)
        for tokens in itertools.product(range(len(TEXTS)), repeat=count)
        if any(word.startswith(text_of(tokens)) for word in WORDS)
    ]


def test_masks_are_those_of_enumeration() -> None:
    state = state_of(*WORDS)
    choices = 0
    for tokens in prefixes(4):
        expected = allowed_by(WORDS, tokens)
        (mask,) = state.masks(tokens, ())
        assert state.is_over == (expected == {EOS})
        assert state.accepts == (EOS in expected)
        if forced := state.forced(1):
            assert set(forced) == ids_in(mask) <= expected
        else:
            choices += len(expected) > 1
            assert ids_in(mask) == (expected if expected != {EOS} else ALL), tokens
    assert choices > 5


@given(st.lists(TOKENS, min_size=1, max_size=8))
@settings(max_examples=60)
def test_a_state_that_rolls_back_is_a_fresh_one(walks: list[list[int]]) -> None:
    followed = state_of(*WORDS)
    for tokens in walks:
        fits = any(word.startswith(text_of(tokens)) for word in WORDS)
        assert followed.follow(tokens) == fits
        if fits:
            fresh = state_of(*WORDS)
            assert np.array_equal(followed.masks(tokens, ()), fresh.masks(tokens, ()))
            assert followed.forced(8) == fresh.forced(8)


@given(TOKENS, TOKENS)
@settings(max_examples=60)
def test_each_row_is_masked_by_the_tokens_before_it(before: list[int], proposed: list[int]) -> None:
    if not any(word.startswith(text_of(before)) for word in WORDS):
        with pytest.raises(InvalidRequestError, match="is forbidden by the structured output's grammar"):
            state_of(*WORDS).masks(before, proposed)
        return
    rows = state_of(*WORDS).masks(before, proposed)
    assert len(rows) == len(proposed) + 1
    for count, row in enumerate(rows):
        tokens = [*before, *proposed[:count]]
        is_possible = any(word.startswith(text_of(tokens)) for word in WORDS)
        expected = allowed_by(WORDS, tokens) if is_possible else set()
        # What is rejected has no row that counts, and what is over has no next token.
        is_free = expected in (set(), {EOS})
        assert ids_in(row) == ALL if is_free else ids_in(row) == ids_in(state_of(*WORDS).masks(tokens, ())[0])


def test_nothing_is_forced_where_there_is_a_choice() -> None:
    state = state_of("aab", "aac")
    assert state.follow([])
    assert text_of(state.forced(8)) in ("a", "aa")
    assert text_of(state.forced(1)) == "a"
    assert state.follow([0, 0])
    assert state.forced(8) == []


@given(TOKENS, TOKENS)
@settings(max_examples=60)
def test_tokens_that_may_follow_are_counted(before: list[int], proposed: list[int]) -> None:
    state = state_of(*WORDS)
    if not state.follow(before):
        return
    fits = [
        any(word.startswith(text_of([*before, *proposed[: count + 1]])) for word in WORDS)
        for count in range(len(proposed))
    ]
    assert state.allowed_count(proposed) == sum(fits)
    assert state.follow(before)
    assert state.allowed_count([*proposed, VOCABULARY_SIZE - 1]) == sum(fits), "an id without a text"


def test_a_span_of_thought_is_not_looked_into() -> None:
    state = state_of("ab", think_start_token_id=THINK, think_end_token_id=THOUGHT)
    assert state.allowed_count([THINK, 4, 4]) == 3
    assert state.follow([THINK])
    assert state.allowed_count([4, 4]) == 2
    assert state.follow([THINK, THOUGHT])
    assert state.allowed_count([0, 4]) == 1


def test_the_end_is_allowed_where_the_grammar_accepts() -> None:
    state = state_of("ab", "abc")
    assert EOS not in ids_in(state.masks([0], ())[0])
    assert ids_in(state.masks([0, 1], ())[0]) == {TEXTS.index("c"), EOS}
    assert state.follow([0, 1, EOS])
    assert state.is_over
    assert state.follow([0, 1])
    assert not state.is_over


def test_a_span_of_thought_is_free() -> None:
    state = state_of("ab", "ac", think_start_token_id=THINK, think_end_token_id=THOUGHT)
    start = {0, TEXTS.index("ab"), THINK}
    rows = state.masks([], [THINK, 4, 4, THOUGHT, 0, 1])
    assert [ids_in(row) for row in rows] == [
        start,
        ALL,
        ALL,
        ALL,
        start - {THINK},
        {1, TEXTS.index("c")},
        ALL,
    ]
    assert state.masks([], [0])[1].tolist() == state.masks([THINK, THOUGHT, 0], [])[0].tolist()
    assert state.follow([THINK])
    assert (state.forced(8), state.is_over, state.accepts) == ([], False, False)
    inside = state_of("ab", "ac", think_start_token_id=THINK, think_end_token_id=THOUGHT, is_thinking=True)
    assert [ids_in(row) for row in inside.masks([], [4, THOUGHT])] == [ALL, ALL, start - {THINK}]


def kind(name: str, source: str = "") -> Grammar:
    return Grammar(GrammarKind(name), source)


@pytest.fixture(scope="module")
def demo() -> Grammars:
    return Grammars((DEMO_TARGET / "tokenizer.json").read_text, 2048, [0])


def tokens_of(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(text).ids
    return ids


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ünï", "b"]}, "age": {"type": "integer", "minimum": 3, "maximum": 12}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (kind("json_object"), ['{"a": [1, {"b": null}]}'], ["[1]", "{"]),
        (
            kind("json_schema", json.dumps(SCHEMA)),
            ['{"name": "Ünï", "age": 12}'],
            ['{"name": "b", "age": 13}', '{"name": "c", "age": 5}', '{"name": "b"}'],
        ),
        (kind("regex", r"[a-z]+\d{2}"), ["ab12"], ["ab1", "12"]),
        (kind("choice", '["yes", "no\\n\\"", "é"]'), ["yes", 'no\n"', "é"], ["y", "no"]),
        (kind("grammar", 'root ::= "a" b\nb ::= "b" | "c" b'), ["ab", "accb"], ["b", "ac"]),
        (kind("grammar", 'start: "a" /[0-9]+/'), ["a42"], ["a"]),
    ],
)
def test_each_kind_of_grammar(
    demo: Grammars, grammar: Grammar, accepted: Sequence[str], refused: Sequence[str]
) -> None:
    state = demo.compiled(grammar)
    for text in accepted:
        assert state.follow(tokens_of(text))
        assert state.accepts
    for text in refused:
        assert not (state.follow(tokens_of(text)) and state.accepts)


def test_what_json_forces_is_spelled_as_the_tokenizer_does(demo: Grammars) -> None:
    state = demo.compiled(kind("json_schema", json.dumps(SCHEMA)))
    assert state.follow([])
    forced = state.forced(99)
    assert forced == tokens_of('{"name": "b"')[: len(forced)]
    assert len(forced) > 2


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (kind("json_schema", "{"), "json_schema cannot be used"),
        (
            kind("json_schema", '{"type": "array", "uniqueItems": true}'),
            r'Unimplemented keys: \["uniqueItems"\]',
        ),
        (kind("json_schema", '{"enum": []}'), "Unsatisfiable"),
        (kind("regex", "("), "unclosed group"),
        (kind("choice", "{"), "choice cannot be used"),
        (kind("grammar", "root ::= other"), "grammar cannot be used"),
        (kind("grammar", "root ::= " + "(" * 5000), "recursion"),
    ],
)
async def test_a_refusal_to_compile_is_a_line(demo: Grammars, grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        await demo.open(grammar)
    assert "\n" not in str(refusal.value)


async def test_sequences_of_one_grammar_share_nothing_but_its_compilation() -> None:
    grammars = tiny_grammars()
    grammar = Grammar(GrammarKind.REGEX, "a|bc+")
    first, second = [await grammars.open(grammar, "a scope") for _ in range(2)]
    assert first.follow([1])
    assert ids_in(second.masks([], ())[0]) == {0, 1, TEXTS.index("bc")}


async def test_a_grammar_is_compiled_anew_for_another_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = tiny_grammars()
    compiled: list[Grammar] = []
    compile_one = grammars.compile_grammar

    def count(grammar: Grammar) -> object:
        compiled.append(grammar)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "compile_grammar", count)
    counts = []
    for scope in ("first", "first", "second", "second", "", ""):
        await grammars.open(Grammar(GrammarKind.REGEX, "a|bc+"), scope)
        counts.append(len(compiled))
    assert counts == [1, 1, 2, 2, 3, 4]


async def test_a_tokenizer_without_bytes_is_refused() -> None:
    unknown = json.dumps(
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}
    )
    with pytest.raises(InvalidRequestError, match="must be byte-level or have byte fallback"):
        await Grammars(lambda: unknown, 1, []).open(Grammar(GrammarKind.REGEX, "a"))


def test_a_tokenizer_that_the_library_cannot_read_is_refused() -> None:
    """It panics on a token of many bytes, which is no Exception."""
    fields = json.loads((DEMO_TARGET / "tokenizer.json").read_text())
    long = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    fields["added_tokens"].append({"id": 4000, "content": "a" * 4_100, **long})
    grammars = Grammars(lambda: json.dumps(fields), 4096, [0])
    with pytest.raises(InvalidRequestError, match="tokens of thousands of bytes"):
        grammars.compiled(Grammar(GrammarKind.REGEX, "a+"))


def _tokenizer_of(count: int) -> str:
    """A byte-level tokenizer.json of so many tokens."""
    letters = sorted(ByteLevel.alphabet())
    words = ("".join(each) for length in (2, 3) for each in itertools.product(letters, repeat=length))
    tokens = itertools.islice(itertools.chain(letters, words), count)
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer.to_str()


async def test_262k_tokens_are_learnt_once_and_before_the_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt_in: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        learnt_in.append(threading.current_thread().name)
        return known_tokens(*arguments, **named)

    monkeypatch.setattr("tandem.model.grammar.known_tokens", counted)
    content = _tokenizer_of(262_144)
    grammars = Grammars(lambda: content, 262_144, [0])
    await grammars.prepare()
    assert len(learnt_in) == 1
    assert learnt_in[0].startswith("grammar"), "not the event loop's"
    for source in ("a+", "b+"):
        state = await grammars.open(Grammar(GrammarKind.REGEX, source))
        assert state.follow([])
    assert len(learnt_in) == 1


async def test_a_tokenizer_that_cannot_be_read_is_tried_once_and_ends_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise ValueError("no bytes")

    monkeypatch.setattr("tandem.model.grammar.known_tokens", refuse)
    grammars = Grammars(lambda: "{}", 1, [])
    await grammars.prepare()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"byte fallback.*no bytes"):
            await grammars.open(Grammar(GrammarKind.REGEX, "a"))
    assert len(tried) == 1


SLOW = (
    "\n".join(f'r{i} ::= r{i + 1} | "x" r{i + 1} "y"' for i in range(3000)) + '\nr3000 ::= "a"\nroot ::= r0'
)
"""The library takes minutes for it, and no limit of its own stops it sooner."""


@pytest.fixture
def grammars() -> Iterator[CheckedGrammars]:
    made = CheckedGrammars(Grammars((DEMO_TARGET / "tokenizer.json").read_text, 2048, [0]))
    yield made
    made.close()


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(
    grammars: CheckedGrammars,
) -> None:
    for _ in range(2):  # the second time without trying
        began = time.process_time()
        with pytest.raises(
            InvalidRequestError, match=r"cannot be used: it (takes more than 2 s|was not done within 30 s)"
        ):
            await grammars.open(Grammar(GrammarKind.GRAMMAR, SLOW), "a scope")
        assert time.process_time() - began < 2.0, "not in this process"
    state = await grammars.open(Grammar(GrammarKind.CHOICE, '["a"]'), "a scope")
    assert state.follow([])
