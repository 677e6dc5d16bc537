"""The next round runs while the reader processes a chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.chunks.delivery import stream_of
from coordinator.requests.chunks.queue import ChunkQueue
from tandem.errors import ServiceUnavailableError
from tandem.types import Chunk, FinishReason, SpeculationStats, Summary

SUMMARY = Summary(FinishReason.LENGTH, 1, 3, SpeculationStats(), request_id="r", seed=0)


class Rounds:
    """A completion of three chunks, each from a round that lasts until it is released."""

    def __init__(self, error_in: int | None = None) -> None:
        self.begun = 0
        self.requested = 0
        self.ending: str | None = None
        self.may_end = asyncio.Semaphore(0)
        self._error_in = error_in

    async def chunks(self) -> AsyncGenerator[Chunk]:
        try:
            for number in range(3):
                self.begun += 1
                question = asyncio.create_task(self._ask())
                await self.may_end.acquire()
                await question
                if number == self._error_in:
                    raise ServiceUnavailableError("lost")
                yield Chunk(str(number), (number,), (False,), (1,), summary=SUMMARY if number == 2 else None)
            self.ending = "complete"
        except BaseException as error:
            self.ending = type(error).__name__
            raise

    async def _ask(self) -> None:
        self.requested += 1

    async def run(self, queue: ChunkQueue) -> None:
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                await queue.put(chunk)

    def let(self, count: int) -> None:
        for _ in range(count):
            self.may_end.release()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


PAUSES = st.lists(st.integers(0, 4), min_size=4, max_size=4)
"""Turns of the event loop before each chunk is made or requested."""


async def test_the_next_round_has_sent_its_request_when_a_chunk_is_delivered() -> None:
    rounds = Rounds()
    rounds.let(1)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        assert (await anext(chunks)).text == "0"
        assert rounds.requested == 2


async def test_at_most_one_chunk_waits_for_a_stalled_reader() -> None:
    rounds = Rounds()
    rounds.let(3)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        await anext(chunks)
        await turns()
        assert rounds.begun == 2


async def test_the_completion_ends_after_its_last_chunk_was_taken() -> None:
    rounds = Rounds()
    rounds.let(3)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        assert [(await anext(chunks)).text for _ in range(3)] == ["0", "1", "2"]
        await turns()
        assert rounds.ending is None
        assert await anext(chunks, None) is None
    assert rounds.ending == "complete"


async def test_an_error_follows_the_earlier_chunks() -> None:
    rounds = Rounds(error_in=1)
    rounds.let(3)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        assert (await anext(chunks)).text == "0"
        await turns()
        with pytest.raises(ServiceUnavailableError, match="lost"):
            await anext(chunks)


async def test_a_leaving_reader_cancels_the_current_round() -> None:
    rounds = Rounds()
    rounds.let(1)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        await anext(chunks)
        assert rounds.ending is None
    assert rounds.ending == "CancelledError"


async def test_a_leaving_reader_closes_the_generator_between_two_rounds() -> None:
    rounds = Rounds()
    rounds.let(3)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        await anext(chunks)
        await turns()
    assert rounds.ending == "GeneratorExit"


async def test_an_unread_error_is_not_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(error_in=1)
    rounds.let(3)
    async with aclosing(stream_of(rounds.run, None)) as chunks:
        await anext(chunks)
        await turns()
    assert rounds.ending == "ServiceUnavailableError"
    del rounds, chunks
    await turns()
    assert not caplog.records


async def test_cancelling_the_reader_ends_the_round_it_waits_for() -> None:
    rounds = Rounds()

    async def read() -> None:
        async with aclosing(stream_of(rounds.run, None)) as chunks:
            await anext(chunks)

    reader = asyncio.create_task(read())
    await turns()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert rounds.ending == "CancelledError"


@given(making=PAUSES, reading=PAUSES)
def test_every_chunk_arrives_at_any_speed_of_rounds_and_reader(making: list[int], reading: list[int]) -> None:
    async def run(queue: ChunkQueue) -> None:
        for number, pause in enumerate(making):
            await turns(pause)
            summary = SUMMARY if number == len(making) - 1 else None
            await queue.put(Chunk(str(number), (number,), (False,), (1,), summary=summary))

    async def read() -> list[str]:
        pauses = iter(reading)
        texts: list[str] = []
        async for chunk in stream_of(run, None):
            texts.append(chunk.text)
            await turns(next(pauses))
        return texts

    async def read_within(count: int) -> list[str]:
        reader = asyncio.create_task(read())
        await turns(count)
        assert reader.done(), "reader and rounds wait for each other"
        return await reader

    assert asyncio.run(read_within(100)) == ["0", "1", "2", "3"]
