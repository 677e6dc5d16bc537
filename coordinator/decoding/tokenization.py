"""The target's tokenizer, from the files that its service sends."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tokenizers import Encoding, Tokenizer

from coordinator.decoding.token_lengths import max_bytes_per_token
from tandem.errors import ProtocolError

TOKENIZER_FILE = "tokenizer.json"

_SHORT_CHARACTERS = 1_000
"""Shorter texts are tokenized on the event loop: this takes at most 2 ms, mostly less than a hop to a thread."""
_LONG_CHARACTERS = 32_000
"""Longer texts are tokenized one at a time, so that they neither take all cores nor delay shorter texts."""


def read_tokenizer(files: dict[str, bytes]) -> Tokenizer:
    """The tokenizer that a target service's files describe.

    Raises:
        ProtocolError: the files lack tokenizer.json.
    """
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
        self._max_bytes_per_token = max_bytes_per_token(tokenizer)
        # A pool starts its threads with the first text that needs one.
        self._long = ThreadPoolExecutor(1, "encode-long")
        self._medium = ThreadPoolExecutor(2, "encode")

    def max_bytes(self, token_count: int) -> int | None:
        """Maximum bytes of UTF-8 in so many tokens; None where the tokenizer sets no bound."""
        per_token = self._max_bytes_per_token
        return None if per_token is None else per_token * token_count

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The text's token ids, with or without the special tokens that the tokenizer adds by itself."""
        encode = partial(_encoded, self.tokenizer, text, add_special_tokens=add_special_tokens)
        if len(text) < _SHORT_CHARACTERS:
            return tuple(encode().ids)
        threads = self._medium if len(text) < _LONG_CHARACTERS else self._long
        encoded = await asyncio.get_running_loop().run_in_executor(threads, encode)
        return tuple(encoded.ids)


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    """Encode with the batch method, the only one that releases the interpreter lock.

    With a text of 1 MiB, `Tokenizer.encode` stopped all other threads for 1.8 s, the batch method for at most 20 ms.
    """
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
