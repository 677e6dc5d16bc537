"""A stream yields answers and pushes in order, and leaves no task running after it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tandem.errors import InvalidRequestError, TandemError
from tandem.serving.streams import answered


@dataclass
class Stream:
    """The requests and pushes of a scripted stream."""

    requested: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)
    pushed: asyncio.Queue[str | Exception] = field(default_factory=asyncio.Queue)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    async def requests(self) -> AsyncIterator[str]:
        while (request := await self.requested.get()) is not None:
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

    def request(self, *requests: str | None) -> None:
        for request in requests:
            self.requested.put_nowait(request)

    def push(self, *pushes: str) -> None:
        for each in pushes:
            self.pushed.put_nowait(each)


@asynccontextmanager
async def assert_no_task_is_left() -> AsyncIterator[Stream]:
    """Yield a stream, and assert after the block that no task of it runs on."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(10.0):
        yield Stream()
        for _ in range(5):  # the event loop closes an abandoned generator
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("pushes", [True, False])
async def test_answers_come_in_order_and_end_with_the_requests(pushes: bool) -> None:
    async with assert_no_task_is_left() as stream:
        stream.request("a", "unanswered", "b", None)
        assert [each async for each in stream.answers(pushes=pushes)] == ["answer to a", "answer to b"]


async def test_pushes_come_between_answers_in_their_order() -> None:
    async with assert_no_task_is_left() as stream:
        answers = stream.answers()
        stream.push("1", "2")
        assert [await anext(answers), await anext(answers)] == ["push of 1", "push of 2"]
        stream.request("a")
        assert await anext(answers) == "answer to a"
        stream.push("3")
        assert await anext(answers) == "push of 3"
        stream.request(None)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)


async def test_answers_precede_pushes() -> None:
    async with assert_no_task_is_left() as stream:
        stream.push("old")
        stream.request("a")
        answers = stream.answers()
        assert await anext(answers) == "answer to a"
        await answers.aclose()


async def test_the_end_of_the_requests_precedes_pushes() -> None:
    """Endless pushes cannot keep a finished sequence open."""
    async with assert_no_task_is_left() as stream:
        stream.push(*map(str, range(1000)))
        stream.request(None)
        assert [each async for each in stream.answers()] == []


async def test_a_pushed_error_ends_the_stream() -> None:
    async with assert_no_task_is_left() as stream:
        answers = stream.answers()
        stream.push("1")
        stream.pushed.put_nowait(TandemError("the step failed"))
        assert await anext(answers) == "push of 1"
        with pytest.raises(TandemError, match="the step failed"):
            await anext(answers)


@pytest.mark.parametrize("pushes", [True, False])
async def test_a_failing_answer_ends_the_stream(pushes: bool) -> None:
    async with assert_no_task_is_left() as stream:
        stream.request("fail", "a")
        with pytest.raises(InvalidRequestError, match="it cannot be answered"):
            await anext(stream.answers(pushes=pushes))


async def test_a_failing_request_ends_the_stream() -> None:
    async with assert_no_task_is_left() as stream:
        stream.requested.put_nowait(InvalidRequestError("the stream ended without finish"))
        with pytest.raises(InvalidRequestError, match="without finish"):
            await anext(stream.answers())


async def test_cancelling_an_idle_stream_leaves_no_task() -> None:
    async with assert_no_task_is_left() as stream:
        reading = asyncio.ensure_future(anext(stream.answers()))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_cancelling_during_an_answer_leaves_no_task() -> None:
    async with assert_no_task_is_left() as stream:
        stream.request("hold")
        stream.push("1")
        reading = asyncio.ensure_future(anext(stream.answers()))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert stream.was_cancelled


async def test_closing_between_two_answers_leaves_no_task() -> None:
    async with assert_no_task_is_left() as stream:
        stream.request("a")
        answers = stream.answers()
        assert await anext(answers) == "answer to a"
        await answers.aclose()
