"""Answers in the forms of OpenAI's API: whole, and piece by piece."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from coordinator.stats.speculation import add, describe_with_state
from tandem.speculation_state import SpeculationState
from tandem.types import Chunk, SpeculationStats, Summary, TokenLogprobs

_IDS = ("token_ids", "drafted", "text_lengths", "proposed", "drafted_ahead")


@dataclass(slots=True)
class Choice:
    """One of the completions of a request, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    """The text of each piece."""
    characters: int = 0
    summary: Summary | None = None
    """How it ended; None while it runs."""
    columns: defaultdict[str, JsonList] = field(default_factory=lambda: defaultdict(JsonList))
    """Entries of a whole answer for each token, by field."""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)


class Answer(ABC):
    """The answer to one request, which gathers the pieces of its completions."""

    whole_object: str
    piece_object: str
    prefix: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        count: int,
        per_prompt: int,
        *,
        with_ids: bool,
    ) -> None:
        """Begin an empty answer.

        Args:
            request_id: The request's name.
            model: The served model's name.
            tokenizer: Decodes single tokens, for log probabilities.
            count: Number of completions.
            per_prompt: Completions of each prompt.
            with_ids: Whether to include token ids and which of them the draft proposed.
        """
        self.choices = [Choice() for _ in range(count)]
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._per_prompt = per_prompt
        self._with_ids = with_ids

    def add(self, index: int, chunk: Chunk) -> None:
        """Note a piece of one of the completions."""
        choice = self.choices[index]
        choice.texts.append(chunk.text)
        choice.characters += len(chunk.text)
        choice.summary = chunk.summary

    def keep(self, index: int, chunk: Chunk) -> int:
        """Note a piece for the whole answer: the number of bytes that it takes."""
        self.add(index, chunk)
        choice, kept = self.choices[index], len(chunk.text.encode("utf-8", "replace"))
        columns = self._columns(choice, chunk) | (_ids(chunk) if self._with_ids else {})
        for name, items in columns.items():
            kept += choice.columns[name].extend(items)
        return kept

    def whole(self) -> dict[str, Any]:
        """The whole answer, once every completion has ended. Every piece of it was kept."""
        choices = [
            {**self._whole(choice), **self._ending(index, choice.summary)}
            | ({name: choice.columns[name] for name in _IDS} if self._with_ids else {})
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, **self.account()}

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """The piece that was added last, as an event; None when it says nothing to the client."""
        choice = self.choices[index]
        if not (chunk.text or chunk.summary or chunk.logprobs or self._with_ids or len(choice.texts) == 1):
            return None
        described = {**self._piece(choice, chunk), **self._ending(index, chunk.summary)}
        if self._with_ids:
            described |= _ids(chunk)
        return {**self._head, "object": self.piece_object, "choices": [described]}

    def last_piece(self) -> dict[str, Any]:
        """The event with the usage, if the request asked for it."""
        return {**self._head, "object": self.piece_object, "choices": [], **self.account()}

    def account(self) -> dict[str, Any]:
        """Duration of the completions, and their speculation statistics."""
        total, prompt_tokens, completion_tokens = SpeculationStats(), 0, 0
        state: SpeculationState | None = None
        """State of the last completion; all of them have the same model and draft."""
        for index, choice in enumerate(self.choices):
            if (summary := choice.summary) is None:
                continue
            add(total, summary.speculation)
            state = summary.speculation_state
            completion_tokens += summary.completion_tokens
            if index % self._per_prompt == 0:
                prompt_tokens += summary.prompt_tokens
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": total.accepted,
                    "rejected_prediction_tokens": total.drafted - total.accepted,
                },
            },
            "speculation": describe_with_state(total, state),
        }

    def _ending(self, index: int, summary: Summary | None) -> dict[str, Any]:
        described: dict[str, Any] = {
            "index": index,
            "finish_reason": None if summary is None else summary.finish_reason.value,
            "stop_reason": None if summary is None else summary.stop_reason,
        }
        if self._with_ids and summary is not None:
            described["seed"] = summary.seed
        return described

    @abstractmethod
    def _columns(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        """The chunk's log probabilities as lists, of which those of all chunks follow each other."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The completion in the endpoint's form."""

    @abstractmethod
    def _piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """The completion's last chunk in the form of the endpoint's events."""


class CompletionAnswer(Answer):
    """An answer of `/v1/completions`."""

    whole_object = piece_object = "text_completion"
    prefix = "cmpl"

    def _columns(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        return self._logprobs(choice, chunk) or {}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        columns = {name: choice.columns[name] for name in COMPLETION_COLUMNS if name in choice.columns}
        return {"text": choice.text, "logprobs": columns or None}

    def _piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._logprobs(choice, chunk)}

    def _logprobs(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]] | None:
        return completion_logprobs(chunk, self._tokenizer, choice.characters - len(chunk.text))


class ChatAnswer(Answer):
    """An answer of `/v1/chat/completions`."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def _columns(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        entries = chat_logprobs(chunk, self._tokenizer)
        return {"content": entries} if entries else {}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        entries = choice.columns.get("content")
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if entries is None else {"content": entries, "refusal": None},
        }

    def _piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        entries = chat_logprobs(chunk, self._tokenizer)
        is_first = len(choice.texts) == 1
        return {
            "delta": {**({"role": "assistant"} if is_first else {}), "content": chunk.text},
            "logprobs": {"content": entries, "refusal": None} if entries else None,
        }


def _ids(chunk: Chunk) -> dict[str, list[Any]]:
    """Return the fields that `return_token_ids` adds."""
    said = (chunk.token_ids, chunk.drafted, chunk.text_lengths, (chunk.proposed,), (chunk.drafted_ahead,))
    return dict(zip(_IDS, map(list, said), strict=True))


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


PART_BYTES = 32 << 10
"""A part is sent once it has so many bytes."""


class JsonList:
    """A list that is kept as the bytes of its JSON."""

    def __init__(self) -> None:
        self._text = bytearray()

    def __len__(self) -> int:
        """Its bytes, brackets included."""
        return len(self._text) + 2

    def extend(self, items: Iterable[object]) -> int:
        """Append items; the number of bytes that they take."""
        before = len(self._text)
        for item in items:
            if self._text:
                self._text += b","
            self._text += rendered(item)
        return len(self._text) - before

    def parts(self) -> Iterator[bytes]:
        """Its JSON."""
        yield b"["
        for start in range(0, len(self._text), PART_BYTES):
            yield bytes(self._text[start : start + PART_BYTES])
        yield b"]"


def rendered(value: object) -> bytes:
    """The JSON of a small value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def flattened(value: object) -> Iterator[bytes | JsonList]:
    """The JSON of a value that holds lists of rendered items, in order."""
    if isinstance(value, JsonList):
        yield value
    elif isinstance(value, dict):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"") + rendered(name) + b":"
            yield from flattened(item)
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for number, item in enumerate(value):
            if number:
                yield b","
            yield from flattened(item)
        yield b"]"
    else:
        yield rendered(value)


def parts(pieces: Iterable[bytes | JsonList]) -> Iterator[bytes]:
    """The same bytes in parts of about `PART_BYTES`."""
    waiting = bytearray()
    for piece in pieces:
        for part in piece.parts() if isinstance(piece, JsonList) else (piece,):
            waiting += part
            if len(waiting) >= PART_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
