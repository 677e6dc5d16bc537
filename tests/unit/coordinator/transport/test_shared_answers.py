"""The answers of one message are handed out a few in each turn of the event loop, in order."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest

from coordinator.transport import streams
from tandem.types import Verification
from tandem.v1.target_pb2 import VerifyRequest, VerifyResponse
from tandem.wire import target as wire
from tests.service.echo_servicer import Asker

SEQUENCES = 10
IN_A_TURN = 4


class OneMessage:
    """A call that answers all sequences by one message, and reads what it is sent."""

    def __init__(self) -> None:
        self.written: list[int] = []
        """Questions of each message."""
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, content: bytes) -> None:
        self.written.append(len(VerifyRequest.FromString(content).steps.records) // 24)

    async def read(self) -> bytes:
        return await self.answers.get()

    def cancel(self) -> bool:
        return True

    def answer_all(self) -> None:
        """Answer the sequences 1, 2, ..., each with as many tokens as its number says."""
        answers = [(number, Verification(number, ())) for number in range(1, SEQUENCES + 1)]
        self.answers.put_nowait(wire.answers_to_proto(answers).SerializeToString())


async def test_the_first_sequences_go_on_before_the_last_have_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "ANSWERS_PER_TURN", IN_A_TURN)
    call = OneMessage()
    shared: streams.Streams[Any, wire.Answer] = streams.Streams(
        streams.Method(
            "target service",
            lambda: cast("Any", call),
            wire.requests_to_proto,
            wire.request_size,
            lambda content: wire.answers_from_proto(VerifyResponse.FromString(content)),
        )
    )
    answered: list[int] = []

    async def two_rounds() -> None:
        sequence = Asker(shared)
        for _ in range(2):
            answer = await sequence.ask(0)
            answered.append(answer)

    tasks = [asyncio.create_task(two_rounds()) for _ in range(SEQUENCES)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert call.written == [SEQUENCES], "questions of one turn are one message"
    call.answer_all()
    counts = [0]
    while counts[-1] < SEQUENCES:
        await asyncio.sleep(0)
        counts.append(len(answered))
    went_on = [after - before for before, after in pairwise(counts) if after > before]
    assert went_on == [4, 4, 2]
    assert call.written[1] == IN_A_TURN, "the questions of the first turn do not wait for the others"
    call.answer_all()
    await asyncio.gather(*tasks)
    assert answered == [*range(1, SEQUENCES + 1)] * 2
