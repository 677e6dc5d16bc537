"""Small tokenizers of all the kinds that language models have, trained in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tandem.model.vocabulary import SAMPLE_TEXT

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


def byte_level(size: int, texts: Sequence[str] = SAMPLE_TEXT, pattern: str | None = None) -> Tokenizer:
    """Byte-level BPE, as in GPT-2 or, with a pattern, in later models."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken("    ", special=False)])
    return tokenizer


def sentencepiece_bpe(size: int, texts: Sequence[str] = SAMPLE_TEXT, *, is_legacy: bool = False) -> Tokenizer:
    """BPE over characters, with a token for each byte that has none, as in Llama 2 (legacy) or Gemma."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, limit_alphabet=60, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in state["vocab"] if piece not in pieces]
    merges = [tuple(merge) for merge in state["merges"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return _finished(tokenizer, has_begin=True)


def sentencepiece_unigram(size: int) -> Tokenizer:
    """A unigram model with a token for each byte that has none."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(SAMPLE_TEXT, trainer)
    own = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["vocab"]]
    first = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{b:02X}>", 0.0) for b in range(256))]
    taken = {piece for piece, _ in first}
    vocabulary = [*first, *(pair for pair in own if pair[0] not in taken)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return _finished(tokenizer, has_begin=False)


def _finished(tokenizer: Tokenizer, *, has_begin: bool) -> Tokenizer:
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if has_begin:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


KINDS = {
    "gpt2": lambda: byte_level(420),
    "small": lambda: byte_level(300),
    "llama3": lambda: byte_level(500, pattern=LLAMA3),
    "gemma": lambda: sentencepiece_bpe(400),
    "llama2": lambda: sentencepiece_bpe(450, is_legacy=True),
    "unigram": lambda: sentencepiece_unigram(300),
}
"""By the name of a model that has the like."""


@cache
def content_of(kind: str) -> str:
    """tokenizer.json of a kind."""
    return KINDS[kind]().to_str()


def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer of a kind, of the caller's own."""
    return Tokenizer.from_str(content_of(kind))
