"""Grammars over a vocabulary small enough to enumerate."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from llguidance import TokenizerWrapper

from tandem.model.grammar import Grammars, GrammarState, MaskArray
from tandem.model.types import Grammar, GrammarKind

TEXTS = ("a", "b", "ab", "ba", "c", "bc", "abc")
EOS = len(TEXTS)
THINK = len(TEXTS) + 1
THOUGHT = len(TEXTS) + 2
VOCABULARY_SIZE = len(TEXTS) + 4
"""With one id that the tokenizer does not know."""


class _Tokenizer:
    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(text.encode() for text in TEXTS), b"<eos>", b"<think>", b"</think>")
    special_token_ids = (EOS, THINK, THOUGHT)

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest tokens from left to right."""
        left = text.encode() if isinstance(text, str) else text
        found = []
        while left:
            length, token_id = max(
                (len(own), i) for i, own in enumerate(self.tokens[:EOS]) if left.startswith(own)
            )
            found.append(token_id)
            left = left[length:]
        return found


def tiny_grammars() -> Grammars:
    """Compiles for the vocabulary."""
    return Grammars(lambda: TokenizerWrapper(_Tokenizer()), VOCABULARY_SIZE, [EOS])


def choice(*words: str, **more: bool | int) -> Grammar:
    """The grammar of these words."""
    return Grammar(GrammarKind.CHOICE, json.dumps(words), **more)  # type: ignore[arg-type]


def state_of(*words: str, **more: bool | int) -> GrammarState:
    """The state of their grammar."""
    return tiny_grammars().compiled(choice(*words, **more))


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids)


def allowed_by(words: Sequence[str], token_ids: Sequence[int]) -> set[int]:
    """By enumeration: the ids that may follow."""
    text = text_of(token_ids)
    found = {i for i, own in enumerate(TEXTS) if any(word.startswith(text + own) for word in words)}
    return found | ({EOS} if text in words else set())


def ids_in(mask: MaskArray) -> set[int]:
    """The ids that a row of a mask allows, within the vocabulary."""
    bits = np.unpackbits(mask.view(np.uint8), count=VOCABULARY_SIZE, bitorder="little")
    return set(np.flatnonzero(bits).tolist())
