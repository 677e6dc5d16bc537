"""A stream must begin with Open and end with Finish; others are refused with a sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tandem.errors import InvalidRequestError
from tandem.serving.streams import opening, steps
from tandem.v1 import target_pb2

OPEN = target_pb2.VerifyRequest(open=target_pb2.VerifyOpen(request_id="r"))
STEP = target_pb2.VerifyRequest(step=target_pb2.VerifyStep(row_count=1))
FINISH = target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish())
EMPTY = target_pb2.VerifyRequest()


async def stream(*messages: target_pb2.VerifyRequest) -> AsyncIterator[target_pb2.VerifyRequest]:
    for message in messages:
        yield message


async def test_a_stream_from_open_to_finish() -> None:
    requests = stream(OPEN, STEP, STEP, FINISH, STEP)
    assert await opening(requests) == OPEN
    assert [message async for message in steps(requests)] == [STEP, STEP]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "the stream ended before it began; its first message must be open"),
        ([STEP], "the stream begins with step; it must begin with open"),
        ([EMPTY], "the stream begins with an empty message; it must begin with open"),
        ([FINISH], "the stream begins with finish; it must begin with open"),
    ],
)
async def test_another_beginning_is_refused(messages: list[target_pb2.VerifyRequest], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await opening(stream(*messages))
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([STEP], "the stream ended without finish"),
        ([OPEN], "open came in an open stream; send step or finish"),
        ([EMPTY], "an empty message came in an open stream; send step or finish"),
    ],
)
async def test_another_course_is_refused(messages: list[target_pb2.VerifyRequest], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        async for _ in steps(stream(*messages)):
            pass
    assert str(refusal.value) == sentence
