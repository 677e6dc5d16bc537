"""Prompts are tokenized without blocking the event loop; hopeless ones are refused by their size."""

from __future__ import annotations

import asyncio
import json
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tandem_coordinator.decoding.tokenization import (
    TOKENIZER_FILE,
    PromptEncoder,
    TokenTexts,
    max_bytes_per_token,
    read_tokenizer,
)
from tests.paths import DEMO_TARGET
from tests.unit.tandem.tiny_tokenizers import tokenizer_of

EXACT = ["demo", "gpt2", "gpt2 nfc", "llama3", "llama2", "gemma"]
ALL = [*EXACT, "words"]


def words() -> Tokenizer:
    """One token for any unknown word, none for whitespace."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@cache
def made(name: str) -> Tokenizer:
    if name == "words":
        return words()
    if name == "demo":
        return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    kind, _, normalizer = name.partition(" ")
    tokenizer = tokenizer_of(kind)
    if normalizer:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def most_bytes(name: str) -> int | None:
    return max_bytes_per_token(made(name))


texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([" ", "\n", "ab", "<|end|>", "<|endoftext|>", "e\u0301", "각", "\U0001d400", "\0"]),
    )
).map("".join)


@settings(max_examples=25)
@given(st.sampled_from(ALL), texts, st.integers(1, 1200))
def test_ids_are_the_tokenizers_own_in_every_way_of_encoding(name: str, text: str, times: int) -> None:
    tokenizer = made(name)
    text = (text * times)[:40_000]
    encoder = PromptEncoder(tokenizer)
    assert asyncio.run(encoder.encode(text)) == tuple(tokenizer.encode(text).ids)


@settings(max_examples=200)
@given(st.sampled_from(EXACT), texts)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(name: str, text: str) -> None:
    most = most_bytes(name)
    assert most is not None
    assert len(text.encode()) <= most * len(made(name).encode(text).ids)


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert max_bytes_per_token(made("demo")) == 32
    assert max_bytes_per_token(made("gpt2 nfc")) == 4 * (max_bytes_per_token(made("gpt2")) or 0)
    assert max_bytes_per_token(words()) is None


def test_a_tokenizer_that_may_drop_text_has_no_bound() -> None:
    stripping, splitting, swallowing = (tokenizer_of("gpt2") for _ in range(3))
    stripping.normalizer = normalizers.Strip()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    swallowing.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert [max_bytes_per_token(each) for each in (stripping, splitting, swallowing)] == [None] * 3


async def test_the_event_loop_runs_while_a_long_text_is_encoded() -> None:
    encoder = PromptEncoder(made("demo"))
    encoding = asyncio.create_task(encoder.encode("The cat sat on the mat. " * 20_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    # `Tokenizer.encode` in a thread lets the loop have two or three.
    assert turns >= 20
    assert len(await encoding) > 100_000


def test_a_tokenizer_that_was_saved_with_truncation_cuts_no_prompt() -> None:
    content = json.loads((DEMO_TARGET / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = read_tokenizer({TOKENIZER_FILE: json.dumps(content).encode()})
    assert tokenizer.encode("a b c d e").ids == made("demo").encode("a b c d e").ids


@settings(max_examples=60)
@given(st.sampled_from(["demo", "gpt2", "llama3", "small", "gemma", "llama2", "unigram"]), st.text())
def test_the_bytes_of_tokens_joined_are_the_text(name: str, text: str) -> None:
    """Also where a character takes several tokens, as an emoji does."""
    tokenizer = made(name)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text + "\N{GRINNING FACE}", add_special_tokens=False).ids
    joined = b"".join(map(texts.bytes, ids)).decode()
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    begins_with_space = joined == f" {decoded}"  # which the decoder of a whole text leaves out
    assert joined == decoded or begins_with_space


def test_bytes_that_are_no_character_are_as_they_are() -> None:
    byte_level = made("gpt2")
    texts = TokenTexts(byte_level)
    first, *rest = byte_level.encode("\N{GRINNING FACE}").ids
    assert rest, "the emoji has several tokens"
    assert texts.bytes(first) == "\N{GRINNING FACE}".encode()[: len(texts.bytes(first))]
    assert texts.text(first) == byte_level.id_to_token(first)
    fallback = made("gemma")
    byte_id = fallback.token_to_id("<0xF0>")
    assert byte_id is not None
    assert TokenTexts(fallback).bytes(byte_id) == b"\xf0"
    assert TokenTexts(fallback, as_ids=True).text(byte_id) == f"token_id:{byte_id}"
