"""The answers of one message are handed out a few in each turn of the event loop, in order."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from coordinator.transport import streams as multiplexed_stream
from coordinator.transport.streams import MultiplexedSequence, MultiplexedStream
from tandem.v1.target_pb2 import VerifyManyRequest, VerifyManyResponse, VerifyResponse
from tandem.v1.types_pb2 import SequencePart

SEQUENCES = 10
IN_A_TURN = 4


class OneMessage:
    """A call that answers all sequences by one message, and reads what it is sent."""

    def __init__(self) -> None:
        self.written: list[int] = []
        """Questions of each message."""
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, content: bytes) -> None:
        self.written.append(len(VerifyManyRequest.FromString(content).parts))

    async def read(self) -> bytes:
        return await self.answers.get()

    def cancel(self) -> bool:
        return True


def message() -> bytes:
    """Answers to the sequences 1, 2, ..., each of which extends as many tokens as its number says."""
    numbers = range(1, SEQUENCES + 1)
    answers = [VerifyResponse(base_length=number).SerializeToString() for number in numbers]
    parts = [
        SequencePart(sequence=number, message=answer) for number, answer in zip(numbers, answers, strict=True)
    ]
    return VerifyManyResponse(parts=parts).SerializeToString()


async def test_the_first_sequences_go_on_before_the_last_have_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiplexed_stream, "ANSWERS_PER_TURN", IN_A_TURN)
    call: Any = OneMessage()
    stream = MultiplexedStream(
        call, lambda parts: VerifyManyRequest(parts=parts), VerifyManyResponse.FromString, lambda _: ()
    )
    answered: list[int] = []

    async def two_rounds() -> None:
        sequence = MultiplexedSequence("target service", stream, VerifyResponse.FromString, None)
        for _ in range(2):
            answer = await sequence.ask(VerifyResponse())
            answered.append(answer.base_length)

    tasks = [asyncio.create_task(two_rounds()) for _ in range(SEQUENCES)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert call.written == [SEQUENCES], "questions of one turn are one message"
    call.answers.put_nowait(message())
    counts = [0]
    while counts[-1] < SEQUENCES:
        await asyncio.sleep(0)
        counts.append(len(answered))
    went_on = [after - before for before, after in pairwise(counts) if after > before]
    assert went_on == [4, 4, 2]
    assert call.written[1] == IN_A_TURN, "the questions of the first turn do not wait for the others"
    call.answers.put_nowait(message())
    await asyncio.gather(*tasks)
    assert answered == [*range(1, SEQUENCES + 1)] * 2
