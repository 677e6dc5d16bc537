"""Answers in the forms of OpenAI's API, whole and piece by piece, and how they are sent."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite, isnan
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from tandem.errors import TandemError
from tandem.model.types import Chunk, FinishReason, Summary, TokenLogprobs
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import CancelledByEventError, unless
from tandem_coordinator.decoding.tokenization import TokenTexts
from tandem_coordinator.http.bodies import HeldBytes, Share
from tandem_coordinator.http.errors import error_object, known
from tandem_coordinator.http.schema import ChatBody, CompletionBody, Sampled
from tandem_coordinator.parsers.reader import CompletionReader, Said
from tandem_coordinator.stats.speculation import describe, describe_as_vllm, describe_sampling, sum_stats

PART_BYTES = 32 << 10
"""Large answers are sent in parts of this size: rendering and sending one holds the event loop for less than 1 ms."""

JsonList = bytearray
"""A list's items as JSON, with commas between them: rendered one by one, they never hold the event loop for long."""


def rendered(value: object) -> bytes:
    """The JSON of a small value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def data_line(content: Mapping[str, Any]) -> bytes:
    """An object as the data of an event."""
    return b"data: " + rendered(content) + b"\n\n"


def flattened(value: object) -> Iterator[bytes | bytearray]:
    """The JSON of a value that holds lists of rendered items, in order."""
    if isinstance(value, JsonList):
        yield from (b"[", value, b"]")
    elif isinstance(value, dict):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"") + rendered(name) + b":"
            yield from flattened(item)
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for number, item in enumerate(value):
            yield b"," if number else b""
            yield from flattened(item)
        yield b"]"
    else:
        yield rendered(value)


def parts(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """The same bytes in parts of about `PART_BYTES`."""
    waiting = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), PART_BYTES):
            waiting += piece[start : start + PART_BYTES]
            if len(waiting) >= PART_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


@dataclass(slots=True)
class Choice:
    """One of the completions of a request, as far as it has come."""

    reader: CompletionReader | None = None
    """Divides its text; None where all of it is content."""
    contents: list[str] = field(default_factory=list)
    """Of each piece."""
    reasonings: list[str] = field(default_factory=list)
    characters: int = 0
    tokens: int = 0
    summary: Summary | None = None
    """Reason and statistics of its end; None while it runs."""
    logprobs: defaultdict[str, JsonList] = field(default_factory=lambda: defaultdict(JsonList))
    ids: defaultdict[str, JsonList] = field(default_factory=lambda: defaultdict(JsonList))
    """Entries of a whole answer for each token, by field; `ids` are those that `return_token_ids` adds."""
    prompt_logprobs: JsonList = field(default_factory=JsonList)
    """Entries for each token of the prompt."""

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.reader is None else self.reader.reasoning_tokens

    @property
    def said(self) -> Said:
        """Its text so far."""
        calls = None if self.reader is None else self.reader.calls
        return Said("".join(self.contents), "".join(self.reasonings), calls)


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that an answer is for."""

    request_id: str
    model: str
    """Name of the model."""
    tokenizer: Tokenizer
    body: Sampled
    prompts: Sequence[tuple[int, ...]] | None = None
    """The prompt of each completion, where they are known before the end."""

    @property
    def prompt_tokens(self) -> list[int] | None:
        """Tokens of each completion's prompt."""
        return None if self.prompts is None else [*map(len, self.prompts)]


class Answer(ABC):
    """The answer to one request, which gathers the pieces of its completions."""

    def __init__(self, asked: Asked, count: int) -> None:
        self.choices = [Choice() for _ in range(count)]
        self._per_prompt = asked.body.choices

    def read_with(self, make_reader: Callable[[], CompletionReader]) -> None:
        """Divide the completions' texts into content, reasoning and calls of tools."""
        for choice in self.choices:
            choice.reader = make_reader()

    def add(self, index: int, chunk: Chunk) -> Said:
        """Note a piece of one of the completions: what its text is."""
        choice = self.choices[index]
        is_last = chunk.summary is not None
        reader = choice.reader
        said = Said(chunk.text)
        if reader is not None:
            said = reader.read(chunk.text, chunk.text_lengths, is_last=is_last)
        choice.contents.append(said.content)
        choice.reasonings.append(said.reasoning)
        choice.characters += len(chunk.text)
        choice.tokens += len(chunk.token_ids)
        choice.summary = chunk.summary
        return said

    @abstractmethod
    def keep(self, index: int, chunk: Chunk) -> int:
        """Note a piece for the whole answer: the number of bytes that it takes."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer, once every completion has ended. Every piece of it was kept."""

    @abstractmethod
    def events(self, chunks: AsyncGenerator[tuple[int, Chunk]]) -> AsyncGenerator[bytes]:
        """The answer piece by piece, as it is made."""

    def failure(self, error: TandemError) -> bytes:
        """The last event of an answer that fails after it has begun."""
        return data_line(error_object(error))

    def account(self) -> dict[str, Any]:
        """Tokens of the completions, and their speculation statistics."""
        summaries = [choice.summary for choice in self.choices if choice.summary is not None]
        total = sum_stats(each.speculation for each in summaries)
        # All of them have the same model and draft.
        state = summaries[-1].speculation_state if summaries else None
        of_prompts = summaries[:: self._per_prompt]  # one of each
        usage = _usage(
            sum(each.prompt_tokens for each in of_prompts), sum(each.completion_tokens for each in summaries)
        )
        usage["prompt_tokens_details"] = {
            "cached_tokens": sum(each.cached_tokens or 0 for each in of_prompts)
        }
        usage["completion_tokens_details"] = {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
            "accepted_prediction_tokens": total.accepted,
            "rejected_prediction_tokens": total.drafted - total.accepted,
        }
        described = {"usage": usage, "speculation": describe(total, state)}
        if len(summaries) == 1:
            described["metrics"] = {
                **_describe_timing(summaries[0]),
                "speculative_decoding": describe_as_vllm(total) if total.drafted else None,
            }
        if summaries and (sampling := summaries[-1].sampling) is not None:
            described["sampling"] = describe_sampling(sampling)
        return described


class ChoicesAnswer(Answer):
    """An answer with a choice for each completion, as completions and chats have it."""

    whole_object: str
    piece_object: str
    prefix: str
    beside_logprobs: Mapping[str, None] = {}
    """Further fields of an object of log probabilities."""

    def __init__(self, asked: Asked, count: int) -> None:
        super().__init__(asked, count)
        self._head = {
            "id": f"{self.prefix}-{asked.request_id}",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._texts = TokenTexts(asked.tokenizer, as_ids=bool(asked.body.return_tokens_as_token_ids))
        self._prompts = (asked.prompts or ()) if asked.body.return_token_ids else ()
        usage = asked.body.stream_options
        self._with_ids = bool(asked.body.return_token_ids)
        self._echoes_prompt = isinstance(asked.body, CompletionBody) and asked.body.echo
        self._with_usage = usage is not None and usage.include_usage
        self._prompt_tokens = asked.prompt_tokens if usage is not None and usage.is_continuous else None

    def keep(self, index: int, chunk: Chunk) -> int:
        self.add(index, chunk)
        choice = self.choices[index]
        kept = len(chunk.text.encode("utf-8", "replace"))
        lists = [(choice.logprobs[name], items) for name, items in self._logprobs(choice, chunk).items()]
        lists += [(choice.ids[name], items) for name, items in self._ids(index, chunk).items()]
        if chunk.prompt_logprobs:
            lists.append((choice.prompt_logprobs, [*self._prompt_logprobs(chunk)]))
        for items, more in lists:
            for item in more:
                items += (b"," if items else b"") + (added := rendered(item))
                kept += len(added) + 1
        return kept

    def whole(self) -> dict[str, Any]:
        choices = [
            self._text(choice.said, is_piece=False) | self._describe(index, choice.logprobs, choice.ids)
            for index, choice in enumerate(self.choices)
        ]
        answer = {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            **self._fingerprint(),
            **self.account(),
        }
        for index, choice in enumerate(self.choices):
            # As in vLLM these are null where nobody asked for them.
            of_prompt: dict[str, Any] = {"prompt_token_ids": None} | self._prompt_ids(index)
            of_prompt["prompt_logprobs"] = choice.prompt_logprobs or None
            choices[index].setdefault("token_ids", None)
            self._add_of_prompt(answer, choices[index], of_prompt)
        return answer

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk]]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            async for index, chunk in chunks:
                choice = self.choices[index]
                said = self.add(index, chunk)
                is_first = len(choice.contents) == 1
                has_text = said.content or said.calls or said.reasoning
                if not (has_text or chunk.summary or chunk.logprobs or self._with_ids or is_first):
                    continue  # it says nothing to the client
                described = self._text(said, is_piece=True, is_first=is_first)
                described |= self._describe(index, self._logprobs(choice, chunk), self._ids(index, chunk))
                piece = {**self._head, "object": self.piece_object, "choices": [described]}
                if chunk.summary is not None:
                    piece |= self._fingerprint()
                if is_first:
                    self._add_of_prompt(piece, described, self._prompt_ids(index))
                if self._prompt_tokens is not None:
                    prompt_tokens = self._prompt_tokens[index]
                    echoed_tokens = prompt_tokens if self._echoes_prompt else 0
                    piece["usage"] = _usage(prompt_tokens, choice.tokens - echoed_tokens)
                yield data_line(piece)
        if self._with_usage:
            yield data_line({**self._head, "object": self.piece_object, "choices": [], **self.account()})
        yield b"data: [DONE]\n\n"

    def _describe(self, index: int, logprobs: dict[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
        reader = self.choices[index].reader
        summary = self.choices[index].summary
        reason = summary and summary.finish_reason
        has_called = reader is not None and reader.has_called and reason is FinishReason.STOP
        return {
            "logprobs": {**logprobs, **self.beside_logprobs} if logprobs else None,
            "index": index,
            "finish_reason": "tool_calls" if has_called else reason and reason.value,
            "stop_reason": summary and summary.stop_reason,
            **({} if summary is None or not self._with_ids else _origin(summary)),
            **ids,
        }

    def _fingerprint(self) -> dict[str, str]:
        """OpenAI's name of what computes the answer: of the target's weights, where it says them."""
        summaries = [choice.summary for choice in self.choices if choice.summary is not None]
        all_weights = dict.fromkeys(each for summary in summaries for each in summary.weights)
        if not all_weights:
            return {}
        names = [f"{each.version}-{each.fingerprint[:16]}" for each in all_weights]
        return {"system_fingerprint": "+".join(names)}

    def _ids(self, index: int, chunk: Chunk) -> dict[str, list[Any]]:
        """The fields that `return_token_ids` adds, for the completion's own tokens."""
        if not self._with_ids:
            return {}
        first = self._count_echoed(index, chunk)
        if first and first == len(chunk.token_ids):
            return {"token_ids": []}
        numbers = {
            "draft_probs": chunk.draft_probs,
            "target_probs": chunk.target_probs,
            "raw_logprobs": chunk.raw_logprobs,
            "processed_logprobs": chunk.processed_logprobs,
        }
        return {
            "token_ids": [*chunk.token_ids[first:]],
            "drafted": [*chunk.drafted[first:]],
            "text_lengths": [*chunk.text_lengths[first:]],
            "proposed": [chunk.proposed],
            "drafted_ahead": [chunk.drafted_ahead],
            **{
                name: [each if isfinite(each) else None for each in given[first:]]
                for name, given in numbers.items()
                if given
            },
        }

    def _count_echoed(self, index: int, chunk: Chunk) -> int:
        """Tokens at a chunk's beginning that are the prompt's: those of `echo` come before all others."""
        if not self._echoes_prompt:
            return 0
        shown_before = self.choices[index].tokens - len(chunk.token_ids)
        return min(max(len(self._prompts[index]) - shown_before, 0), len(chunk.token_ids))

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt's ids, where `return_token_ids` asks for them."""
        return {"prompt_token_ids": [*self._prompts[index]]} if self._prompts else {}

    def _prompt_logprobs(self, chunk: Chunk) -> Iterator[dict[str, Any] | None]:
        """An entry for each token of the prompt in vLLM's form: tokens by id, the prompt's own first."""
        for own_id, position in zip(chunk.prompt_token_ids, chunk.prompt_logprobs, strict=True):
            if isnan(position.logprob):
                yield None
                continue
            found = {own_id: (position.logprob, position.rank)}
            tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
            for place, (token_id, logprob) in enumerate(tops, start=1):
                found.setdefault(token_id, (logprob, place))
            yield {
                str(token_id): {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": self._texts.text(token_id),
                }
                for token_id, (logprob, rank) in found.items()
            }

    @abstractmethod
    def _add_of_prompt(
        self, answer: dict[str, Any], choice: dict[str, Any], of_prompt: Mapping[str, Any]
    ) -> None:
        """Add what is about a completion's prompt, as the endpoint shows it."""

    @abstractmethod
    def _logprobs(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        """The chunk's log probabilities as lists, of which those of all chunks follow each other."""

    @abstractmethod
    def _text(self, said: Said, *, is_piece: bool, is_first: bool = False) -> dict[str, Any]:
        """A completion's text, or a piece of it, as the endpoint shows it."""


class CompletionAnswer(ChoicesAnswer):
    """An answer of `/v1/completions`."""

    whole_object = piece_object = "text_completion"
    prefix = "cmpl"

    def _logprobs(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        positions = chunk.logprobs
        if not positions:
            return {}
        before = choice.characters - len(chunk.text)
        return {
            "tokens": [*map(self._texts.text, chunk.token_ids)],
            "token_logprobs": [None if isnan(each.logprob) else _number(each.logprob) for each in positions],
            "top_logprobs": [
                None if isnan(each.logprob) else self._top(token_id, each)
                for token_id, each in zip(chunk.token_ids, positions, strict=False)
            ],
            "text_offset": [*accumulate(chunk.text_lengths[:-1], initial=before)],
        }

    def _top(self, token_id: int, position: TokenLogprobs) -> dict[str, float]:
        """The completion's own token, and after it the most probable ones, as in vLLM."""
        found = {self._texts.text(token_id): _number(position.logprob)}
        for top_id, logprob in zip(position.top_token_ids, position.top_logprobs, strict=True):
            found.setdefault(self._texts.text(top_id), _number(logprob))
        return found

    def _add_of_prompt(
        self, answer: dict[str, Any], choice: dict[str, Any], of_prompt: Mapping[str, Any]
    ) -> None:
        choice |= of_prompt

    def _text(self, said: Said, *, is_piece: bool, is_first: bool = False) -> dict[str, Any]:
        return {"text": said.content}


class ChatAnswer(ChoicesAnswer):
    """An answer of `/v1/chat/completions`."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    prefix = "chatcmpl"
    beside_logprobs: Mapping[str, None] = {"refusal": None}

    def __init__(self, asked: Asked, count: int) -> None:
        super().__init__(asked, count)
        body = asked.body
        assert isinstance(body, ChatBody), "other bodies have answers of their own"
        self._echoed = body.echoed
        self._with_reasoning = body.include_reasoning is not False

    def _logprobs(self, choice: Choice, chunk: Chunk) -> dict[str, list[Any]]:
        entries = []
        for token_id, position in zip(chunk.token_ids, chunk.logprobs, strict=False):
            entries.append(describe_logprobs(self._texts, token_id, position))
        return {"content": entries} if entries else {}

    def _text(self, said: Said, *, is_piece: bool, is_first: bool = False) -> dict[str, Any]:
        content = said.content if is_piece and not is_first else self._echoed + said.content
        message: dict[str, Any] = {"content": content}
        if said.calls is not None:
            message["content"] = content or None
            message |= {"tool_calls": said.calls} if said.calls else {}
            if said.reasoning and self._with_reasoning:
                # vLLM's name, and that of DeepSeek, SGLang and older versions of vLLM.
                message |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if is_piece:
            return {"delta": {**({"role": "assistant"} if is_first else {}), **message}}
        return {"message": {"role": "assistant", **message, "refusal": None}}

    def _add_of_prompt(
        self, answer: dict[str, Any], choice: dict[str, Any], of_prompt: Mapping[str, Any]
    ) -> None:
        answer |= of_prompt


def describe_logprobs(texts: TokenTexts, token_id: int, position: TokenLogprobs) -> dict[str, Any]:
    """A token with its log probability, and the most probable ones at its place, as chats and responses show it."""
    pairs = zip(position.top_token_ids, position.top_logprobs, strict=True)
    top = [_entry(texts, top_id, logprob) for top_id, logprob in pairs]
    return _entry(texts, token_id, position.logprob) | {"top_logprobs": top}


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.text(token_id),
        "logprob": _number(logprob),
        "bytes": list(texts.bytes(token_id)),
    }


def _origin(summary: Summary) -> dict[str, Any]:
    """The seed and the weights that made a completion."""
    weights = [{"version": each.version, "fingerprint": each.fingerprint} for each in summary.weights]
    return {"seed": summary.seed, "weights": weights}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _describe_timing(summary: Summary) -> dict[str, float]:
    """vLLM's times of a request by its names, in milliseconds, and its tokens per second."""
    timing = summary.timing
    if timing is None:
        return {}
    described = {"queue_time_ms": timing.queue_seconds * 1000}
    if timing.first_token_seconds is not None:
        described["time_to_first_token_ms"] = timing.first_token_seconds * 1000
        described["generation_time_ms"] = timing.generation_seconds * 1000
        if summary.completion_tokens > 1:
            mean_seconds = timing.generation_seconds / (summary.completion_tokens - 1)
            described["mean_itl_ms"] = mean_seconds * 1000
        computed_seconds = timing.first_token_seconds + timing.generation_seconds
        if computed_seconds > 0:
            described["tokens_per_second"] = summary.completion_tokens / computed_seconds
    return {name: round(value, 3) for name, value in described.items()}


def _number(logprob: float) -> float:
    # Substitute for minus infinity, which JSON cannot express; vLLM's
    return max(round(logprob, 6), -9999.0)


# ---- sending


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncGenerator[Chunk]]) -> AsyncGenerator[tuple[int, Chunk]]:
    """The chunks of several completions as they arrive, each with the number of its completion. One that fails ends the
    others. They advance only as fast as they are read."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    waits = {
        asyncio.ensure_future(anext(stream, None)): (index, stream) for index, stream in enumerate(streams)
    }
    try:
        while waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # One in each turn of the event loop, which others need too; the first is the one that waits for longest.
            task = next(each for each in waits if each.done())
            index, stream = waits.pop(task)
            if (following := task.result()) is not None:
                waits[asyncio.ensure_future(anext(stream, None))] = index, stream
                yield index, following
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    # nginx would otherwise hold the pieces back until it has many.
    "x-accel-buffering": "no",
}


class Reply(Response):
    """Sends an answer, as events while it is made, or whole, in parts. A client that goes ends its completions."""

    def __init__(
        self,
        answer: Answer,
        chunks: AsyncGenerator[tuple[int, Chunk]],
        calls: RunningCalls,
        held: HeldBytes,
        headers: Mapping[str, str],
        *,
        streams: bool,
    ) -> None:
        """`held`: bytes of all whole answers, each of which is held until its client has read it."""
        own = _EVENT_HEADERS if streams else {"content-type": "application/json"}
        super().__init__(headers={**own, **headers})
        del self.headers["content-length"]
        self._answer = answer
        self._chunks = chunks
        self._calls = calls
        self._held = held
        self._write = self._stream if streams else self._whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        with suppress(CancelledByEventError):
            await unless(wait_for_disconnect(receive), self._write(send))

    async def _stream(self, send: Send) -> None:
        """The status waits for the first event, so that a refusal has its own."""
        has_begun = False
        try:
            async with self._calls.running(), aclosing(self._answer.events(self._chunks)) as events:
                async for event in events:
                    if not has_begun:
                        has_begun = True
                        await self._begin(send)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as raised:
            if not has_begun:
                raise
            failure = self._answer.failure(known(raised))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _whole(self, send: Send) -> None:
        with closing(Share(self._held)) as share:
            async with self._calls.running(), aclosing(self._chunks) as chunks:
                async for index, chunk in chunks:
                    share.add(self._answer.keep(index, chunk))
            pieces = list(flattened(self._answer.whole()))
            self.headers["content-length"] = str(sum(map(len, pieces)))
            await self._begin(send)
            for part in parts(pieces):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)  # a client that reads fast never makes `send` wait
            await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
