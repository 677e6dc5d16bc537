"""Readers of many streams go on a few at a time, in order, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import DeadlineError, ServiceUnavailableError
from tandem.model.types import Chunk, FinishReason, SpeculationStats, Summary, TokenLogprobs
from tandem_coordinator.requests import chunks
from tandem_coordinator.requests.chunks import ChunkPacer, ChunkQueue, Reader, stream_of


def chunk(number: int) -> Chunk:
    return Chunk(str(number), (number,), (False,), (1,))


def readers(count: int) -> list[Reader]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_a_reader_that_was_cancelled_stops_no_other() -> None:
    pacer = ChunkPacer()
    (gone, waiting) = readers(2)
    pacer.hand_over(gone, chunk(0))
    pacer.hand_over(waiting, chunk(1))
    gone.cancel()
    await asyncio.sleep(0)
    assert gone.cancelled()
    assert waiting.result() == chunk(1)


SUMMARY = Summary(FinishReason.LENGTH, 1, 3, SpeculationStats(), request_id="r", seed=0)
SECONDS = 20.0
SHORT_PAUSE = 0.02


def numbered(*token_ids: int, is_last: bool = False) -> Chunk:
    """A round's chunk; the text of a token is its number in a pair of brackets."""
    texts = [f"[{token_id}]" for token_id in token_ids]
    return Chunk(
        "".join(texts),
        token_ids,
        tuple(token_id % 2 == 0 for token_id in token_ids),
        tuple(map(len, texts)),
        SUMMARY if is_last else None,
        proposed=len(token_ids),
        logprobs=tuple(TokenLogprobs(-float(token_id)) for token_id in token_ids),
    )


def rounds_of(counts: list[int]) -> list[Chunk]:
    """Rounds of so many tokens each, which count up."""
    chunks = []
    first = 0
    for number, count in enumerate(counts):
        chunks.append(numbered(*range(first, first + count), is_last=number == len(counts) - 1))
        first += count
    return chunks


async def delivered(
    rounds: list[Chunk], interval: int, making: list[int] | None = None, reading: list[int] | None = None
) -> list[Chunk]:
    """The chunks that a reader gets, with pauses in turns of the event loop on both sides."""

    async def run(queue: ChunkQueue) -> None:
        for number, each in enumerate(rounds):
            await turns(making[number % len(making)] if making else 0)
            await queue.put(each)

    found: list[Chunk] = []
    async with asyncio.timeout(SECONDS):
        async for each in stream_of(run, ChunkQueue(interval), None):
            found.append(each)
            await turns(reading[len(found) % len(reading)] if reading else 0)
    return found


async def read(stream: AsyncGenerator[Chunk], found: list[Chunk]) -> None:
    """Add the stream's chunks to those found, even if it ends with an error."""
    async for each in stream:
        found.append(each)  # noqa: PERF401 - those before an error count


PAUSES = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=30), interval=st.integers(1, 20), making=PAUSES,
       reading=PAUSES)  # fmt: skip
def test_joined_chunks_say_what_the_rounds_said_and_are_cut_at_the_interval(
    counts: list[int], interval: int, making: list[int], reading: list[int]
) -> None:
    rounds = rounds_of(counts)
    found = asyncio.run(delivered(rounds, interval, making, reading))
    assert Chunk.join(found) == Chunk.join(rounds)
    assert found[0].token_ids == rounds[0].token_ids, "the first tokens are sent at once"
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    position = 0
    for each in found[1:-1]:
        position += len(each.token_ids)
        assert len(each.token_ids) >= interval
    for before, each in pairwise(found):
        first = before.token_ids[-1] + 1
        until = each.token_ids[-1] + 1
        assert until in ends, "a round is never split"
        earlier = [end for end in ends if first < end < until]
        assert all(end - first < interval for end in earlier), "no round is added to tokens that are enough"
    assert all(each.summary is None for each in found[:-1])


def test_a_joined_chunk_counts_all_of_its_rounds() -> None:
    whole = Chunk.join([numbered(1, 2), numbered(), numbered(3)])
    assert whole == Chunk(
        "[1][2][3]",
        (1, 2, 3),
        (False, True, False),
        (3, 3, 3),
        proposed=3,
        logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0)),
    )


async def test_a_pause_delivers_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PAUSE_SECONDS", SHORT_PAUSE)
    goes_on = asyncio.Event()

    async def run(queue: ChunkQueue) -> None:
        await queue.put(numbered(1))
        await queue.put(numbered(2))
        await queue.put(numbered(3))
        await goes_on.wait()
        await queue.put(numbered(4, is_last=True))

    async with asyncio.timeout(SECONDS), aclosing(stream_of(run, ChunkQueue(100), None)) as stream:
        assert (await anext(stream)).token_ids == (1,)
        assert (await anext(stream)).token_ids == (2, 3)
        goes_on.set()
        assert (await anext(stream)).token_ids == (4,)
        assert await anext(stream, None) is None


async def test_a_deadline_delivers_what_was_held_and_counts_it() -> None:
    async def run(queue: ChunkQueue) -> None:
        for number in range(3):
            await queue.put(numbered(number))
        await asyncio.Event().wait()

    found: list[Chunk] = []
    with pytest.raises(DeadlineError, match="3 tokens were delivered"):
        await read(stream_of(run, ChunkQueue(100), 0.05), found)
    assert Chunk.join(found).token_ids == (0, 1, 2)


async def test_a_reader_that_stops_holds_up_the_rounds_after_one_interval() -> None:
    made = 0

    async def run(queue: ChunkQueue) -> None:
        nonlocal made
        while True:
            await queue.put(numbered(made))
            made += 1

    async with aclosing(stream_of(run, ChunkQueue(4), None)) as stream:
        await anext(stream)
        await asyncio.sleep(0.05)
        assert made == 4, "three are held, the fourth waits with them for the reader"
        assert (await anext(stream)).token_ids == (1, 2, 3, 4)


class Rounds:
    """A completion of three chunks, each from a round that lasts until it is released."""

    def __init__(self, released: int, error_in: int | None = None) -> None:
        self.ending: str | None = None
        self._released = asyncio.Semaphore(released)
        self._error_in = error_in

    async def chunks(self) -> AsyncGenerator[Chunk]:
        try:
            for number in range(3):
                await self._released.acquire()
                if number == self._error_in:
                    raise ServiceUnavailableError("lost")
                yield numbered(number, is_last=number == 2)
            self.ending = "complete"
        except BaseException as error:
            self.ending = type(error).__name__
            raise

    async def run(self, queue: ChunkQueue) -> None:
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                await queue.put(chunk)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_completion_ends_after_its_last_chunk_was_taken() -> None:
    rounds = Rounds(released=3)
    async with aclosing(stream_of(rounds.run, ChunkQueue(), None)) as chunks:
        assert [(await anext(chunks)).token_ids for _ in range(3)] == [(0,), (1,), (2,)]
        await turns()
        assert rounds.ending is None
        assert await anext(chunks, None) is None
    assert rounds.ending == "complete"


@pytest.mark.parametrize(
    ("rounds", "ending"),
    [
        pytest.param(Rounds(1), "CancelledError", id="within a round"),
        pytest.param(Rounds(3), "GeneratorExit", id="between two rounds"),
        pytest.param(Rounds(3, error_in=1), "ServiceUnavailableError", id="before an error was read"),
    ],
)
async def test_a_leaving_reader_ends_the_rounds(
    rounds: Rounds, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aclosing(stream_of(rounds.run, ChunkQueue(), None)) as chunks:
        await anext(chunks)
        await turns()
    assert rounds.ending == ending
    del chunks
    await turns()
    assert not caplog.records, "no error is left behind"
