"""Readers of many streams go on a few at a time, in order, and none is forgotten."""

from __future__ import annotations

import asyncio

from coordinator.requests.chunks.pacing import ChunkPacer, Reader
from tandem.types import Chunk


def chunk(number: int) -> Chunk:
    return Chunk(str(number), (number,), (False,), (1,))


def readers(count: int) -> list[Reader]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_a_turn_of_the_loop_hands_over_so_many_chunks() -> None:
    pacer, waiting = ChunkPacer(chunks_per_turn=3), readers(8)
    for number, reader in enumerate(waiting):
        pacer.hand_over(reader, chunk(number))
    done_after_turns = []
    for _ in range(4):
        done_after_turns.append([reader.done() for reader in waiting].count(True))
        await asyncio.sleep(0)
    assert done_after_turns == [0, 3, 6, 8]
    assert [reader.result() for reader in waiting] == [chunk(number) for number in range(8)]


async def test_what_comes_in_later_turns_is_handed_over_too() -> None:
    pacer, waiting = ChunkPacer(chunks_per_turn=1), readers(3)
    pacer.hand_over(waiting[0], chunk(0))
    pacer.hand_over(waiting[1], chunk(1))
    await asyncio.sleep(0)
    pacer.hand_over(waiting[2], chunk(2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert [reader.result() for reader in waiting] == [chunk(0), chunk(1), chunk(2)]
    late = readers(1)[0]
    pacer.hand_over(late, chunk(3))
    await asyncio.sleep(0)
    assert late.result() == chunk(3)


async def test_a_reader_that_was_cancelled_stops_no_other() -> None:
    pacer, (gone, waiting) = ChunkPacer(), readers(2)
    pacer.hand_over(gone, chunk(0))
    pacer.hand_over(waiting, chunk(1))
    gone.cancel()
    await asyncio.sleep(0)
    assert gone.cancelled()
    assert waiting.result() == chunk(1)
