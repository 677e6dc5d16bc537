"""The target's tokenizer, from the files that its service sends."""

from __future__ import annotations

import asyncio
from functools import partial

from tokenizers import Tokenizer

from tandem.errors import ProtocolError

TOKENIZER_FILE = "tokenizer.json"

# Shorter texts are tokenized in less time than a hop to another thread takes.
_LONG_TEXT_CHARACTERS = 10_000


def read_tokenizer(files: dict[str, bytes]) -> Tokenizer:
    """The tokenizer that a target service's files describe.

    Raises:
        ProtocolError: it is not among them.
    """
    if TOKENIZER_FILE not in files:
        raise ProtocolError(f"target service: it sent no {TOKENIZER_FILE}, only {sorted(files) or 'nothing'}")
    return Tokenizer.from_str(files[TOKENIZER_FILE].decode())


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The text's token ids, with the special tokens that the tokenizer adds by itself unless told otherwise."""
    encoded = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tuple((encoded() if len(text) < _LONG_TEXT_CHARACTERS else await asyncio.to_thread(encoded)).ids)
