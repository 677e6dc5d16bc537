"""Answers in the form of OpenAI's API: whole, and piece by piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from coordinator.http.openai.logprobs import chat_logprobs, completion_logprobs
from coordinator.stats.speculation import add, describe_with_state
from tandem.speculation_state import SpeculationState
from tandem.types import Chunk, SpeculationStats, Summary


@dataclass(slots=True)
class Choice:
    """One of the completions of a request, as far as it has come."""

    chunks: list[Chunk] = field(default_factory=list)
    characters: int = 0

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def summary(self) -> Summary | None:
        """How it ended; None while it runs."""
        return self.chunks[-1].summary if self.chunks else None


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
        self.choices[index].chunks.append(chunk)
        self.choices[index].characters += len(chunk.text)

    def whole(self) -> dict[str, Any]:
        """The whole answer, once every completion has ended."""
        choices = [
            {**self._choice(choice, choice.chunks, is_piece=False), **self._ending(index, choice.chunks)}
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, **self.account()}

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """The piece that was added last, as an event; None when it says nothing to the client."""
        choice = self.choices[index]
        if not (chunk.text or chunk.summary or chunk.logprobs or self._with_ids or len(choice.chunks) == 1):
            return None
        described = {**self._choice(choice, [chunk], is_piece=True), **self._ending(index, [chunk])}
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

    def _ending(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        summary = chunks[-1].summary
        described: dict[str, Any] = {
            "index": index,
            "finish_reason": None if summary is None else summary.finish_reason.value,
            "stop_reason": None if summary is None else summary.stop_reason,
        }
        if self._with_ids:
            described |= {
                "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
                "drafted": [drafted for chunk in chunks for drafted in chunk.drafted],
                "text_lengths": [length for chunk in chunks for length in chunk.text_lengths],
                "proposed": [chunk.proposed for chunk in chunks],
                "drafted_ahead": [chunk.drafted_ahead for chunk in chunks],
            }
            if summary is not None:
                described["seed"] = summary.seed
        return described

    @abstractmethod
    def _choice(self, choice: Choice, chunks: Sequence[Chunk], *, is_piece: bool) -> dict[str, Any]:
        """Convert the chunks to the endpoint's form."""


class CompletionAnswer(Answer):
    """Of `/v1/completions`."""

    whole_object = piece_object = "text_completion"
    prefix = "cmpl"

    def _choice(self, choice: Choice, chunks: Sequence[Chunk], *, is_piece: bool) -> dict[str, Any]:
        text = "".join(chunk.text for chunk in chunks)
        offset = choice.characters - len(text)
        return {"text": text, "logprobs": completion_logprobs(chunks, self._tokenizer, offset)}


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def _choice(self, choice: Choice, chunks: Sequence[Chunk], *, is_piece: bool) -> dict[str, Any]:
        text = "".join(chunk.text for chunk in chunks)
        logprobs = chat_logprobs(chunks, self._tokenizer)
        if not is_piece:
            return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
        is_first = len(choice.chunks) == 1
        return {
            "delta": {**({"role": "assistant"} if is_first else {}), "content": text},
            "logprobs": logprobs,
        }
