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

from tandem.model.types import Chunk, FinishReason
from tandem_coordinator.http.answers import Answer, Asked, data_line
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


class BlockWriter:
    """Makes blocks of what a completion says, one after the other."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        """By their numbers in the completion."""
        self._held: list[str] = []
        """Content that came while a call was written: its block follows the call's."""

    def add(self, said: Said, *, is_last: bool) -> list[Change]:
        """The changes that a piece of the completion makes. The last one ends all blocks; there is at least one."""
        changes: list[Change] = []
        if said.reasoning:
            changes += self._write(BlockKind.REASONING, said.reasoning)
        if said.content:
            changes += self._say(said.content)
        for delta in said.calls or ():
            changes += self._call(delta)
        if is_last:
            changes += self._end()
            if not self.blocks:
                changes += self._begin(Block(BlockKind.TEXT, 0))
                changes += self._end()
        return changes

    def _say(self, content: str) -> list[Change]:
        if self._open is not None and self._open.kind is BlockKind.CALL:
            self._held.append(content)
            return []
        return self._write(BlockKind.TEXT, content)

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

    def _write(self, kind: BlockKind, text: str) -> list[Change]:
        """Write into the open block, or into a new one where that is of another kind."""
        changes: list[Change] = []
        if self._open is None or self._open.kind is not kind:
            changes += self._begin(Block(kind, -1))
        assert self._open is not None
        changes.append(self._grow(self._open, text))
        return changes

    def _begin(self, block: Block) -> list[Change]:
        changes = self._end()
        block.index = len(self.blocks)
        self.blocks.append(block)
        self._open = block
        changes.append(Change(Moment.BEGAN, block))
        return changes

    def _grow(self, block: Block, text: str) -> Change:
        block.pieces.append(text)
        return Change(Moment.GREW, block, text)

    def _end(self) -> list[Change]:
        """End the open block, and then what was held because of it."""
        if self._open is None:
            return []
        changes = [Change(Moment.ENDED, self._open)]
        self._open = None
        if self._held:
            content = "".join(self._held)
            self._held.clear()
            changes += self._write(BlockKind.TEXT, content)
            changes += self._end()
        return changes


class BlockAnswer(Answer):
    """An answer of one completion as blocks. Whole and streamed, it has the same ones."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked, 1)
        self._writer = BlockWriter()

    @property
    def blocks(self) -> list[Block]:
        return self._writer.blocks

    @property
    def is_cut(self) -> bool:
        """True if the completion has reached its maximum."""
        summary = self.choices[0].summary
        return summary is not None and summary.finish_reason is FinishReason.LENGTH

    def keep(self, index: int, chunk: Chunk) -> int:
        self._writer.add(self.add(index, chunk), is_last=chunk.summary is not None)
        return len(chunk.text.encode("utf-8", "replace"))

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk]]) -> AsyncGenerator[bytes]:
        has_begun = False
        async with aclosing(chunks):
            async for index, chunk in chunks:
                if not has_begun:
                    has_begun = True
                    for event in self._begin():
                        yield event
                for change in self._writer.add(self.add(index, chunk), is_last=chunk.summary is not None):
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


def event_line(content: dict[str, Any]) -> bytes:
    """An object as an event that is named by its type."""
    return f"event: {content['type']}\n".encode() + data_line(content)
