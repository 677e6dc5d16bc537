"""The target's tokenizer, from the files that its service sends, and how prompts are encoded and bounded with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.vocabulary import steps_of

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Maximum bytes of UTF-8 text that one token can stand for; None where no such bound is certain.

    A bound is certain for tokenizers that keep every byte of a text: byte-level BPE, and tokenizers that fall back to a
    token for each byte. Others may drop whitespace, map any number of unknown words to one token, or have special
    tokens that swallow the whitespace around them; then a text of any length may have few tokens.
    """
    added = tokenizer.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None
    shrinking = _max_shrinkage(steps_of(tokenizer.normalizer))
    pre_tokenizers = [*steps_of(tokenizer.pre_tokenizer)]
    if shrinking is None or not all(map(_keeps_text, pre_tokenizers)):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not _keeps_bytes(tokenizer, vocabulary, is_byte_level=is_byte_level):
        return None
    # A character of a byte-level token stands for one byte.
    longest = max(map(len, vocabulary) if is_byte_level else map(_size, vocabulary), default=1)
    longest_added = max((_size(token.content) for token in added.values()), default=1)
    return max(longest, longest_added) * shrinking


def _keeps_bytes(tokenizer: Tokenizer, vocabulary: dict[str, int], *, is_byte_level: bool) -> bool:
    """True if each byte of a text has a token, whatever the text is."""
    model = tokenizer.model
    if is_byte_level:
        return isinstance(model, BPE) and all(mark in vocabulary for mark in ByteLevel.alphabet())
    # The published types declare this attribute on one of the two only.
    falls_back = isinstance(model, BPE | Unigram) and bool(getattr(model, "byte_fallback", False))
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_text(step: dict[str, Any]) -> bool:
    """True if a pre-tokenizer splits text without dropping any."""
    if step["type"] in ("ByteLevel", "Metaspace", "Digits"):
        return True
    return step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"


def _max_shrinkage(steps: Iterable[dict[str, Any]]) -> int | None:
    """How many bytes of a text may become one byte of the normalized text; None where any number may."""
    shrinking = 1
    for step in steps:
        if step["type"] in _UNICODE_FORMS:
            # Unicode's normal forms shrink UTF-8 at most to a quarter: mathematical letters of four bytes become ASCII
            shrinking *= 4
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or _size(step["content"]) < _size(pattern):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinking


def _size(text: str) -> int:
    return len(text.encode())


# ---- single tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
"""Stands for a space in SentencePiece's spelling."""


def _bytes_by_mark() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: GPT-2's table, in which printable bytes stand for
    themselves, and the others are counted from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    marks = {chr(byte): byte for byte in printable}
    marks |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return marks


_BYTES_BY_MARK = _bytes_by_mark()


class TokenTexts:
    """Texts and bytes of single tokens, to show them beside a completion's text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """With `as_ids`, texts are of vLLM's form `token_id:{id}`."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """A token as text. One that is only a part of a character is shown as the tokenizer spells it."""
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a completion's text, also where they are only a part of a character. A
        tokenizer that drops the space before a text's first word does so in the text alone."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8", "replace")
        spelling: str = self._tokenizer.id_to_token(token_id) or ""
        if "ByteLevel" in self._decoder_steps and all(mark in _BYTES_BY_MARK for mark in spelling):
            return bytes(_BYTES_BY_MARK[mark] for mark in spelling)
        byte = _BYTE_TOKEN.fullmatch(spelling)
        if byte is not None and "ByteFallback" in self._decoder_steps:
            return bytes.fromhex(byte[1])
        return self._text(token_id).encode("utf-8", "replace")

    def _text(self, token_id: int) -> str:
        spelling: str = self._tokenizer.id_to_token(token_id) or ""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        # A decoder strips the space of a text's first word
        if spelling.startswith(_SPACE_MARK) and spelling.replace(_SPACE_MARK, " ") == f" {text}":
            return f" {text}"
        return spelling if "\N{REPLACEMENT CHARACTER}" in text or not text else text

    @cached_property
    def _added(self) -> dict[int, str]:
        decoder = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in decoder.items()}

    @cached_property
    def _decoder_steps(self) -> frozenset[str]:
        return frozenset(step["type"] for step in steps_of(self._tokenizer.decoder))


# ---- texts to tokens

TOKENIZER_FILE = "tokenizer.json"

_SHORT_CHARACTERS = 1_000
"""Shorter texts are tokenized on the event loop: this takes at most 2 ms, mostly less than a hop to a thread."""
_LONG_CHARACTERS = 32_000
"""Longer texts are tokenized one at a time, so that they neither take all cores nor delay shorter texts."""


def read_tokenizer(files: dict[str, bytes]) -> Tokenizer:
    """The tokenizer that a target service's files describe."""
    if TOKENIZER_FILE not in files:
        raise ProtocolError(f"target service: it sent no {TOKENIZER_FILE}, only {sorted(files) or 'nothing'}")
    tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
    # Some files still truncate and pad as in training; a prompt must stay whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptEncoder:
    """Turns prompts into token ids without stopping the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.max_bytes_per_token = max_bytes_per_token(tokenizer)
        # A pool starts its threads with the first text that needs one.
        self._long = ThreadPoolExecutor(1, "encode-long")
        self._medium = ThreadPoolExecutor(2, "encode")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The text's token ids, with or without the special tokens that the tokenizer adds by itself."""
        encode = partial(_encode, self.tokenizer, text, add_special_tokens=add_special_tokens)
        if len(text) < _SHORT_CHARACTERS:
            return tuple(encode().ids)
        threads = self._medium if len(text) < _LONG_CHARACTERS else self._long
        encoded = await asyncio.get_running_loop().run_in_executor(threads, encode)
        return tuple(encoded.ids)

    async def encode_words(self, words: Sequence[str], vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
        """The sequences of token ids that words may be in a text, as vLLM finds them for `bad_words`: those of each
        word without a space before it, and those with one where that begins with another token and is as long. Those
        with an id that the model does not have are left out."""
        forms = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}")]
        encode = partial(_encode_all, self.tokenizer, forms)
        if sum(map(len, forms)) < _SHORT_CHARACTERS:
            encoded = encode()
        else:
            encoded = await asyncio.get_running_loop().run_in_executor(self._medium, encode)
        found: dict[tuple[int, ...], None] = {}
        for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
            if plain:
                found[plain] = None
            if plain and spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
                found[spaced] = None
        return tuple(sequence for sequence in found if max(sequence) < vocabulary_size)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    """Encode with the batch method, the only one that releases the interpreter lock.

    With a text of 1 MiB, `Tokenizer.encode` stopped all other threads for 1.8 s, the batch method for at most 20 ms.
    """
    return _encode_batch(tokenizer, [text], add_special_tokens=add_special_tokens)[0]


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(each.ids) for each in _encode_batch(tokenizer, texts, add_special_tokens=False)]


def _encode_batch(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> Sequence[Encoding]:
    try:
        return tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except BaseException as error:
        # A panic of the Rust library is a BaseException that no module exports.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InvalidRequestError(f"the model's tokenizer cannot split the text: {error}") from None
        raise
