"""Grammars that constrain completions: compiled by llguidance, followed token by token, turned into masks of ids.

A mask is a row of bits, little-endian in int32 words: a set bit is an id that the grammar allows. Everything here is a
function of the completion's tokens, so whoever has the tokens has the state: a rollback, a branch and a replica that
takes a sequence over need nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from tandem.errors import InvalidRequestError
from tandem.model.types import Grammar, GrammarKind, ModelInfo, common_length

MaskArray: TypeAlias = npt.NDArray[np.int32]
"""Masks, shape [rows, words]."""

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. With any white space allowed, small models write it without end, and no text is
forced, so that nothing can be proposed without a model."""

MAX_CACHED = 64
"""Compiled grammars that a process keeps: some hundred KiB each."""
_LONGEST_REASON = 300
"""Characters of llguidance's reasons that are passed on."""
_ALL = np.int32(-1)


def grammar_limits() -> LLParserLimits:
    """Limits of compilation and of each mask.

    A lexer state takes one or two KiB, so that a grammar's states fit into 64 MiB. A mask's fuel lasts 7 ms. Beyond a
    limit the request fails, and no other.
    """
    return LLParserLimits(
        max_lexer_states=32_000, step_lexer_fuel=100_000, step_max_items=50_000, verbose_errors=False
    )


def definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Not every definition can be compiled."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
                schema = grammar.source or '{"type": "object"}'
                return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)  # type: ignore[arg-type]
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.source)
            case GrammarKind.CHOICE:
                choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(grammar.source))
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
            case GrammarKind.GRAMMAR:
                return grammar_from("grammar", grammar.source)
    except (ValueError, RecursionError) as error:
        raise make_refusal(grammar, str(error)) from None


def make_refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    """The refusal of a grammar, with llguidance's reason in a line."""
    return InvalidRequestError(
        f"the structured output's {grammar.kind.value} cannot be used: {reason_of(reason)}"
    )


def reason_of(error: str) -> str:
    """An error of llguidance's in a line, without the state that it adds."""
    return " ".join(error.partition("\n<")[0].split())[:_LONGEST_REASON] or "no reason was given"


@dataclass(eq=False)
class Grammars:
    """Compiles grammars for the tokens of one model, in a thread, and keeps the last ones."""

    _read: Callable[[], str | TokenizerWrapper]
    """Returns the content of tokenizer.json. Called once, in the thread."""
    _vocabulary_size: int
    """The model's; the tokenizer may know fewer ids."""
    _eos_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = ""
        """Reason why the tokenizer cannot be read, once this was tried."""
        self._compiled: OrderedDict[tuple[str, Grammar], LLMatcher] = OrderedDict()
        """By scope as well (`tandem.serving.scopes`): that one is known can be told by the time that it takes."""
        self._thread = ThreadPoolExecutor(1, "grammar")

    @classmethod
    def of(cls, tokenizer_file: Path, model: ModelInfo) -> Grammars:
        return cls(tokenizer_file.read_text, model.vocabulary_size, model.eos_token_ids)

    async def prepare(self) -> None:
        """Get to know the tokens by their bytes, which takes 3 s for 128k ids and holds the interpreter's lock: before
        anything is served, since nothing is answered meanwhile. What cannot be read is refused with a grammar."""
        with suppress(InvalidRequestError):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._tokens)

    async def open(self, grammar: Grammar, scope: str = "") -> GrammarState:
        """The state before the first token. Without a scope nothing is kept."""
        key = scope, grammar
        found = self._compiled.get(key)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, self.compile_grammar, grammar
            )
            if scope:
                self._compiled[key] = found
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        with suppress(KeyError):  # another request may have pushed it out meanwhile
            self._compiled.move_to_end(key)
        return self._state(found.deep_copy(), grammar)

    def compiled(self, grammar: Grammar) -> GrammarState:
        """`open` without a thread and without keeping anything."""
        return self._state(self.compile_grammar(grammar), grammar)

    def _state(self, matcher: LLMatcher, grammar: Grammar) -> GrammarState:
        return GrammarState(matcher, grammar, self._tokens().vocab_size, self._vocabulary_size)

    def compile_grammar(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokens(), definition(grammar), log_level=0, limits=grammar_limits())
        try_first_step(matcher)  # what the first mask computes serves all copies
        if matcher.is_error():
            raise make_refusal(grammar, matcher.get_error())
        return matcher

    def _tokens(self) -> LLTokenizer:
        if self._unreadable:
            raise InvalidRequestError(self._unreadable)
        if self._tokenizer is None:
            content = self._read()
            if isinstance(content, str):
                content = _whole(content)
            try:
                self._tokenizer = known_tokens(
                    content, n_vocab=self._vocabulary_size, eos_token=list(self._eos_token_ids) or None
                )
            except ValueError as error:
                self._unreadable = (
                    "structured output cannot read the model's tokenizer; it must be byte-level or have byte fallback, "
                    f"without tokens of thousands of bytes: {error}"
                )
                raise InvalidRequestError(self._unreadable) from None
        return self._tokenizer


def try_first_step(matcher: LLMatcher) -> None:
    """Compute what is asked before the first token. Only then some grammars without end turn out to be beyond the
    limits, which the matcher's error says."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        matcher.compute_ff_tokens()


def known_tokens(tokenizer: str | TokenizerWrapper, **options: Any) -> LLTokenizer:
    """A tokenizer, or the content of its tokenizer.json, as llguidance knows it: by the bytes of its tokens.

    A ValueError says that they are not known: it is neither byte-level nor of sentencepiece's kind, or has tokens of
    some kilobytes.
    """
    try:
        return LLTokenizer(tokenizer, **options)
    except BaseException as error:
        # On tokens of some kilobytes the library panics, which is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from None


def _whole(content: str) -> str:
    """A tokenizer.json without the truncation and the padding of training."""
    fields = json.loads(content)
    if not (fields.get("truncation") or fields.get("padding")):
        return content
    return json.dumps({**fields, "truncation": None, "padding": None})


class GrammarState:
    """A grammar's state behind the tokens of one completion. One thread at a time uses it."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, known_ids: int, vocabulary_size: int) -> None:
        self._matcher = matcher
        self.grammar = grammar
        self._known_ids = known_ids
        """Ids below this have a text; others are forbidden."""
        self._mask_bytes = 4 * -(-known_ids // 32)
        self.words = 2 * -(-vocabulary_size // 64)
        """Words of a mask: an even number, so that masks are int64 as well, as arrays for a device have to be."""
        self._read: list[int] = []
        """The tokens that the matcher has read: those behind a think span."""
        self._is_first = True
        self._is_free = False

    def follow(self, token_ids: list[int]) -> bool:
        """Go to the state behind these tokens, all of the completion's; False where the grammar forbids one of them. An
        InvalidRequestError says that it exceeds the limits."""
        begin = self._end_of_thought(token_ids)
        self._is_first = not token_ids
        self._is_free = begin < 0
        own = [] if self._is_free else token_ids[begin:]
        read = self._read
        kept = len(self._read)
        if own[:kept] != read:
            kept = common_length(read, own)
            self._matcher.rollback(len(read) - kept)
            del read[kept:]
        missing = own[kept:]
        if not missing:
            return True
        count = self._count_allowed(missing)
        if count and not self._matcher.consume_tokens(missing[:count]):
            self._check()
        read += missing[:count]
        return count == len(missing)

    @property
    def is_over(self) -> bool:
        """True if the grammar accepts and nothing may follow but the completion's end."""
        return not self._is_free and self._matcher.is_stopped()

    @property
    def accepts(self) -> bool:
        return not self._is_free and self._matcher.is_accepting()

    def forced(self, most: int) -> list[int]:
        """The tokens, up to so many, of the only text that may follow; they spell it as the tokenizer does, and the
        grammar may allow other spellings. An InvalidRequestError says that it exceeds the limits."""
        if self._is_free or self._may_think or self._matcher.is_stopped():
            return []
        found: list[int] = self._matcher.compute_ff_tokens()[:most]
        self._check()
        return found

    def allowed_count(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow. A span in which anything may is not looked into."""
        if self._is_free or self._may_think:
            return len(token_ids)
        return self._count_allowed(token_ids)

    def _count_allowed(self, token_ids: Sequence[int]) -> int:
        known = itertools.takewhile(lambda token_id: token_id < self._known_ids, token_ids)
        count: int = self._matcher.validate_tokens([*known])
        return count

    def fill(self, row: MaskArray) -> None:
        """Write the mask of the next token into a row of zeros, shape [words]. Where nothing is constrained, or nothing
        can follow, all ids are allowed. An InvalidRequestError says that the grammar exceeds the limits."""
        if self._is_free or self._matcher.is_stopped():
            row[:] = _ALL
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._mask_bytes)
        self._check()
        if self._may_think:
            start = self.grammar.think_start_token_id or 0
            row.view(np.uint32)[start // 32] |= np.uint32(1 << start % 32)

    def masks(self, before: Sequence[int], proposed: Sequence[int]) -> MaskArray:
        """The masks at each position of a proposal and behind it, int32 [len(proposed) + 1, words].

        Behind a token that the grammar forbids, which is rejected, all ids are allowed.
        """
        rows = np.zeros((len(proposed) + 1, self.words), dtype=np.int32)
        tokens = list(before)
        if not self.follow(tokens):
            raise InvalidRequestError(
                f"token {len(self._read)} of the completion is forbidden by the structured output's grammar"
            )
        self.fill(rows[0])
        for i, token_id in enumerate(proposed, start=1):
            tokens.append(token_id)
            if self.is_over or not self.follow(tokens):
                rows[i:] = _ALL
                break
            self.fill(rows[i])
        return rows

    @property
    def _may_think(self) -> bool:
        """True before the first token of a model that may think before it answers."""
        return self._is_first and self.grammar.think_start_token_id is not None

    def _end_of_thought(self, token_ids: list[int]) -> int:
        """Index of the first token behind the think span with which the completion begins; -1 within it."""
        start = self.grammar.think_start_token_id
        end = self.grammar.think_end_token_id
        thinks = self.grammar.is_thinking or token_ids[:1] == [start]
        if not thinks or end is None:
            return 0
        return token_ids.index(end) + 1 if end in token_ids else -1

    def _check(self) -> None:
        if self._matcher.is_error():
            raise make_refusal(self.grammar, self._matcher.get_error())
