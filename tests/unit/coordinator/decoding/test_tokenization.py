"""Prompts are tokenized without blocking the event loop; hopeless ones are refused by their size."""

from __future__ import annotations

import asyncio
import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from coordinator.decoding.tokenization import (
    TOKENIZER_FILE,
    PromptEncoder,
    max_bytes_per_token,
    read_tokenizer,
)
from tests.paths import DEMO_TARGET

CORPUS = ["def main(): return 1", "the cat sat on the mat, éàü 日本語", "    indented\n\n\ttext 12345"] * 4
EXACT = ["demo", "byte level", "byte level nfc", "byte fallback"]
ALL = [*EXACT, "words"]


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama's: spaces become marks, and unknown characters become bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def words() -> Tokenizer:
    """One token for any unknown word, none for whitespace."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@cache
def tokenizer_of(name: str) -> Tokenizer:
    makers = {
        "demo": demo,
        "byte level": byte_level,
        "byte level nfc": lambda: byte_level(normalizers.NFC()),
        "byte fallback": byte_fallback,
        "words": words,
    }
    return makers[name]()


texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([" ", "\n", "ab", "<|end|>", "<|endoftext|>", "e\u0301", "각", "\U0001d400", "\0"]),
    )
).map("".join)


@settings(max_examples=25)
@given(st.sampled_from(ALL), texts, st.integers(1, 1200))
def test_ids_are_the_tokenizers_own_in_every_way_of_encoding(name: str, text: str, times: int) -> None:
    tokenizer, text = tokenizer_of(name), (text * times)[:40_000]
    encoder = PromptEncoder(tokenizer)
    assert asyncio.run(encoder.encode(text)) == tuple(tokenizer.encode(text).ids)


@settings(max_examples=200)
@given(st.sampled_from(EXACT), texts)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    most = max_bytes_per_token(tokenizer)
    assert most is not None
    assert len(text.encode()) <= most * len(tokenizer.encode(text).ids)


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert max_bytes_per_token(tokenizer_of("demo")) == 32
    assert max_bytes_per_token(tokenizer_of("byte level nfc")) == 4 * (
        max_bytes_per_token(tokenizer_of("byte level")) or 0
    )
    assert PromptEncoder(tokenizer_of("demo")).max_bytes(10) == 320
    assert PromptEncoder(words()).max_bytes(10) is None


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def splitting(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [stripping, splitting, swallowing])
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: object) -> None:
    tokenizer = byte_level()
    assert callable(change)
    change(tokenizer)
    assert max_bytes_per_token(tokenizer) is None


async def test_the_event_loop_runs_while_a_long_text_is_encoded() -> None:
    encoder = PromptEncoder(tokenizer_of("demo"))
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
    assert tokenizer.encode("a b c d e").ids == tokenizer_of("demo").encode("a b c d e").ids
