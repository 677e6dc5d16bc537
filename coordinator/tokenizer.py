"""The target's tokenizer, fetched from its service: the coordinator needs no shared disk."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from tokenizers import Tokenizer

from tandem.channels import errors_of
from tandem.errors import ProtocolError
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceStub

TOKENIZER_FILE = "tokenizer.json"

# Shorter texts are tokenized in less time than a hop to another thread takes.
_LONG_TEXT_CHARACTERS = 10_000


async def fetch_tokenizer(stub: TargetServiceStub) -> Tokenizer:
    """The tokenizer that the target service says its model has.

    Raises:
        TandemError: the service failed, or sent no tokenizer that can be read.
    """
    files: defaultdict[str, bytes] = defaultdict(bytes)
    with errors_of("target service"):
        async for part in stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
            files[part.file_name] += part.content
    if TOKENIZER_FILE not in files:
        raise ProtocolError(f"target service: it sent no {TOKENIZER_FILE}, only {sorted(files) or 'nothing'}")
    return Tokenizer.from_str(files[TOKENIZER_FILE].decode())


async def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The text's token ids, with the special tokens that the tokenizer adds by itself."""
    if len(text) < _LONG_TEXT_CHARACTERS:
        return tuple(tokenizer.encode(text).ids)
    return tuple((await asyncio.to_thread(tokenizer.encode, text)).ids)
