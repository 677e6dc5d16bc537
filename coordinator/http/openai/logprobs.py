"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from tandem.types import Chunk, TokenLogprobs

_LEAST = -9999.0
"""Substitute for minus infinity, which JSON cannot express."""

_REPLACEMENT = "\ufffd"
_SENTENCEPIECE_SPACE = "\u2581"


COMPLETION_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_logprobs(
    chunk: Chunk, tokenizer: Tokenizer, text_offset: int = 0
) -> dict[str, list[Any]] | None:
    """Log probabilities in the form of `/v1/completions`; None when the request did not ask for them.

    Args:
        chunk: The chunk that they belong to.
        tokenizer: Decodes the tokens.
        text_offset: Number of characters before the chunk.
    """
    positions = chunk.logprobs
    if not positions:
        return None
    offsets = []
    for length in chunk.text_lengths:
        offsets.append(text_offset)
        text_offset += length
    columns = (
        [token_text(tokenizer, token_id) for token_id in chunk.token_ids],
        [_number(position.logprob) for position in positions],
        [_top(tokenizer, position) for position in positions],
        offsets,
    )
    return dict(zip(COMPLETION_COLUMNS, columns, strict=True))


def chat_logprobs(chunk: Chunk, tokenizer: Tokenizer) -> list[Any]:
    """Those of `/v1/chat/completions`, an entry for each token; empty when none were asked for."""
    return [
        {
            **_entry(tokenizer, token_id, position.logprob),
            "top_logprobs": [
                _entry(tokenizer, top_id, logprob)
                for top_id, logprob in zip(position.top_token_ids, position.top_logprobs, strict=True)
            ],
        }
        for token_id, position in zip(chunk.token_ids, chunk.logprobs, strict=False)
    ]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text. One that is only a part of a character is shown as the tokenizer spells it."""
    spelling: str = tokenizer.id_to_token(token_id) or ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT in text or not text:
        return spelling
    # A decoder strips the space of a text's first word.
    return f" {text}" if spelling.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" ") else text


def _top(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, float]:
    pairs = zip(position.top_token_ids, position.top_logprobs, strict=True)
    return {token_text(tokenizer, token_id): _number(logprob) for token_id, logprob in pairs}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _number(logprob: float) -> float:
    return max(round(logprob, 6), _LEAST)
