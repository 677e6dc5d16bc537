"""A stream's answers and what is pushed between them: in order, and nothing runs on once the stream has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tandem.errors import InvalidRequestError, TandemError
from tandem.serving.streams.pushes import answered


@dataclass
class Stream:
    """What is asked and pushed, and the answers."""

    asked: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)
    pushed: asyncio.Queue[str | Exception] = field(default_factory=asyncio.Queue)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    async def requests(self) -> AsyncIterator[str]:
        while (request := await self.asked.get()) is not None:
            if isinstance(request, Exception):
                raise request
            yield request

    async def answer(self, request: str) -> str | None:
        match request:
            case "hold":
                try:
                    await self.held.wait()
                except asyncio.CancelledError:
                    self.was_cancelled = True
                    raise
            case "fail":
                raise InvalidRequestError("it cannot be answered")
            case "unanswered":
                return None
        return f"answer to {request}"

    def answers(self, *, pushes: bool = True) -> AsyncGenerator[str]:
        pushed = self.pushed if pushes else None
        return answered(self.requests(), self.answer, pushed, lambda push: f"push of {push}")

    def ask(self, *requests: str | None) -> None:
        for request in requests:
            self.asked.put_nowait(request)

    def push(self, *pushes: str) -> None:
        for each in pushes:
            self.pushed.put_nowait(each)


@asynccontextmanager
async def without_leftovers() -> AsyncIterator[Stream]:
    before = asyncio.all_tasks()
    async with asyncio.timeout(10.0):
        yield Stream()
        for _ in range(5):  # a generator that was left is closed by the event loop
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("pushes", [True, False])
async def test_answers_come_in_order_and_end_with_the_requests(pushes: bool) -> None:
    async with without_leftovers() as stream:
        stream.ask("a", "unanswered", "b", None)
        assert [each async for each in stream.answers(pushes=pushes)] == ["answer to a", "answer to b"]


async def test_pushes_come_between_answers_in_their_order() -> None:
    async with without_leftovers() as stream:
        answers = stream.answers()
        stream.push("1", "2")
        assert [await anext(answers), await anext(answers)] == ["push of 1", "push of 2"]
        stream.ask("a")
        assert await anext(answers) == "answer to a"
        stream.push("3")
        assert await anext(answers) == "push of 3"
        stream.ask(None)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)


async def test_a_request_goes_before_what_was_pushed() -> None:
    async with without_leftovers() as stream:
        stream.push("old")
        stream.ask("a")
        answers = stream.answers()
        assert await anext(answers) == "answer to a"
        await answers.aclose()


async def test_the_end_goes_before_what_was_pushed() -> None:
    """Endless pushes do not keep a finished sequence."""
    async with without_leftovers() as stream:
        stream.push(*map(str, range(1000)))
        stream.ask(None)
        assert [each async for each in stream.answers()] == []


async def test_a_pushed_error_ends_the_stream() -> None:
    async with without_leftovers() as stream:
        answers = stream.answers()
        stream.push("1")
        stream.pushed.put_nowait(TandemError("the step failed"))
        assert await anext(answers) == "push of 1"
        with pytest.raises(TandemError, match="the step failed"):
            await anext(answers)


@pytest.mark.parametrize("pushes", [True, False])
async def test_a_failing_answer_ends_the_stream(pushes: bool) -> None:
    async with without_leftovers() as stream:
        stream.ask("fail", "a")
        with pytest.raises(InvalidRequestError, match="it cannot be answered"):
            await anext(stream.answers(pushes=pushes))


async def test_a_failing_request_ends_the_stream() -> None:
    async with without_leftovers() as stream:
        stream.asked.put_nowait(InvalidRequestError("the stream ended without finish"))
        with pytest.raises(InvalidRequestError, match="without finish"):
            await anext(stream.answers())


async def test_cancelled_while_it_waits_nothing_runs_on() -> None:
    async with without_leftovers() as stream:
        reading = asyncio.ensure_future(anext(stream.answers()))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_cancelled_in_the_middle_of_an_answer_nothing_runs_on() -> None:
    async with without_leftovers() as stream:
        stream.ask("hold")
        stream.push("1")
        reading = asyncio.ensure_future(anext(stream.answers()))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert stream.was_cancelled


async def test_closed_between_two_answers_nothing_runs_on() -> None:
    async with without_leftovers() as stream:
        stream.ask("a")
        answers = stream.answers()
        await anext(answers)
        await answers.aclose()
