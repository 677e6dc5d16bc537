"""Answers as a list of blocks, each of reasoning, of text, or a call of a tool, as Anthropic's Messages and OpenAI's
Responses have them."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from tandem.model.types import Chunk, FinishReason, TokenLogprobs
from tandem_coordinator.decoding.tokenization import TokenTexts
from tandem_coordinator.http.answers import (
    Answer,
    Asked,
    JsonList,
    data_line,
    describe_logprobs,
    flattened,
    rendered,
)
from tandem_coordinator.parsers.reader import Said


class BlockKind(Enum):
    """The kind of text that a block holds."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """A part of an answer."""

    kind: BlockKind
    index: int
    """Its place in the answer."""
    call_id: str = ""
    """Of a call: the name by which its result is sent back."""
    function: str = ""
    """Of a call."""
    pieces: list[str] = field(default_factory=list)
    """Of its text, or of a call's arguments."""
    logprobs: JsonList = field(default_factory=JsonList)
    """An entry for each token of its text, where the request asked for them."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Moment(Enum):
    """Moment in the life of a block."""

    BEGAN = auto()
    GREW = auto()
    ENDED = auto()


class Change(NamedTuple):
    """A change of one block."""

    moment: Moment
    block: Block
    piece: str = ""
    """Text by which it grew."""
    logprobs: bytes = b""
    """Entries for the tokens of that text, as JSON with commas between them."""


class BlockWriter:
    """Makes blocks of what a completion says, one after the other."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        """By their numbers in the completion."""
        self._held: list[str] = []
        """Content that came while a call was written: its block follows the call's."""
        self._held_logprobs = JsonList()

    def add(self, said: Said, logprobs: bytes = b"", *, is_last: bool) -> list[Change]:
        """The changes that a piece of the completion makes. The last one ends all blocks; there is at least one."""
        changes: list[Change] = []
        if said.reasoning:
            changes += self._write(BlockKind.REASONING, said.reasoning)
        if said.content:
            changes += self._say(said.content, logprobs)
        for delta in said.calls or ():
            changes += self._call(delta)
        if is_last:
            changes += self._end()
            if not self.blocks:
                changes += self._begin(Block(BlockKind.TEXT, 0))
                changes += self._end()
        return changes

    def _say(self, content: str, logprobs: bytes) -> list[Change]:
        if self._open is not None and self._open.kind is BlockKind.CALL:
            self._held.append(content)
            _append(self._held_logprobs, logprobs)
            return []
        return self._write(BlockKind.TEXT, content, logprobs)

    def _call(self, delta: dict[str, Any]) -> list[Change]:
        number = delta["index"]
        function = delta["function"]
        changes: list[Change] = []
        if number not in self._calls:
            self._calls[number] = Block(BlockKind.CALL, -1, call_id=delta["id"], function=function["name"])
            changes += self._begin(self._calls[number])
        if arguments := function["arguments"]:
            changes.append(self._grow(self._calls[number], arguments))
        return changes

    def _write(self, kind: BlockKind, text: str, logprobs: bytes = b"") -> list[Change]:
        """Write into the open block, or into a new one where that is of another kind."""
        changes: list[Change] = []
        if self._open is None or self._open.kind is not kind:
            changes += self._begin(Block(kind, -1))
        assert self._open is not None
        changes.append(self._grow(self._open, text, logprobs))
        return changes

    def _begin(self, block: Block) -> list[Change]:
        changes = self._end()
        block.index = len(self.blocks)
        self.blocks.append(block)
        self._open = block
        changes.append(Change(Moment.BEGAN, block))
        return changes

    def _grow(self, block: Block, text: str, logprobs: bytes = b"") -> Change:
        block.pieces.append(text)
        _append(block.logprobs, logprobs)
        return Change(Moment.GREW, block, text, logprobs)

    def _end(self) -> list[Change]:
        """End the open block, and then what was held because of it."""
        if self._open is None:
            return []
        changes = [Change(Moment.ENDED, self._open)]
        self._open = None
        if self._held:
            content = "".join(self._held)
            logprobs = bytes(self._held_logprobs)
            self._held.clear()
            self._held_logprobs.clear()
            changes += self._write(BlockKind.TEXT, content, logprobs)
            changes += self._end()
        return changes


class BlockAnswer(Answer):
    """An answer of one completion as blocks. Whole and streamed, it has the same ones."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked, 1)
        self._writer = BlockWriter()
        self._texts = TokenTexts(asked.tokenizer)
        self._waiting: dict[int, tuple[int, TokenLogprobs]] = {}
        """Tokens by number of which it is not known yet what they are, with their log probabilities."""

    @property
    def blocks(self) -> list[Block]:
        return self._writer.blocks

    @property
    def is_cut(self) -> bool:
        """True if the completion has reached its maximum."""
        summary = self.choices[0].summary
        return summary is not None and summary.finish_reason is FinishReason.LENGTH

    def keep(self, index: int, chunk: Chunk) -> int:
        changes = self._change_by(index, chunk)
        return len(chunk.text.encode("utf-8", "replace")) + sum(len(change.logprobs) for change in changes)

    def _change_by(self, index: int, chunk: Chunk) -> list[Change]:
        said = self.add(index, chunk)
        logprobs = self._take_logprobs(chunk, said)
        return self._writer.add(said, logprobs, is_last=chunk.summary is not None)

    def _take_logprobs(self, chunk: Chunk, said: Said) -> bytes:
        """The entries of the tokens that a piece of content was made of."""
        number = self.choices[0].tokens - len(chunk.token_ids)
        for token_id, position in zip(chunk.token_ids, chunk.logprobs, strict=False):
            self._waiting[number] = (token_id, position)
            number += 1
        if not said.content or not self._waiting:
            return b""
        numbers = list(self._waiting) if said.content_tokens is None else said.content_tokens
        found = [self._waiting.pop(each) for each in numbers if each in self._waiting]
        entries = [rendered(describe_logprobs(self._texts, *token)) for token in found]
        # What came before them was reasoning, or a call.
        for passed in [each for each in self._waiting if numbers and each < numbers[-1]]:
            del self._waiting[passed]
        return b",".join(entries)

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk]]) -> AsyncGenerator[bytes]:
        has_begun = False
        async with aclosing(chunks):
            async for index, chunk in chunks:
                if not has_begun:
                    has_begun = True
                    for event in self._begin():
                        yield event
                for change in self._change_by(index, chunk):
                    for event in self._change(change):
                        yield event
        for event in self._end():
            yield event

    @abstractmethod
    def _begin(self) -> Iterator[bytes]:
        """The events with which the answer begins."""

    @abstractmethod
    def _change(self, change: Change) -> Iterator[bytes]:
        """The events of a change of one block."""

    @abstractmethod
    def _end(self) -> Iterator[bytes]:
        """The events with which it ends."""


def _append(items: JsonList, more: bytes) -> None:
    """Add entries to a list."""
    if items and more:
        items += b","
    items += more


def event_line(content: dict[str, Any], *, has_lists: bool = False) -> bytes:
    """An object as an event that is named by its type. It may have lists whose items are rendered."""
    data = b"data: " + b"".join(flattened(content)) + b"\n\n" if has_lists else data_line(content)
    return f"event: {content['type']}\n".encode() + data
