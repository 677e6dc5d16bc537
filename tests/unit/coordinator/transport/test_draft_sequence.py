"""One sequence on a draft that does not read, or from before drafting ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from coordinator.decoding.completion import Completion
from coordinator.transport.draft_client import DraftLimits, DraftSequence
from coordinator.transport.streams import SequenceStream
from tandem.errors import ProtocolError
from tandem.types import AheadBudget, DraftOptions, Proposal, RowKind, SamplingParams
from tandem.v1 import draft_pb2
from tandem.wire import draft as wire

BUDGET = AheadBudget(4, 3)
OPTIONS = DraftOptions("r", SamplingParams(temperature=0.0), ahead=BUDGET, row_kind=RowKind.TOKEN)
LIMITS = DraftLimits(vocabulary_size=100, num_speculative_tokens=3, keeps_proposals=False)
SECONDS = 20.0


class Stream(SequenceStream[wire.Answer]):
    """A stream without a service: a test reads what is sent, and answers."""

    def __init__(self) -> None:
        super().__init__("draft service", draft_pb2.ProposeResponse.FromString, None)
        self.sent: list[draft_pb2.ProposeRequest] = []
        self.is_read = asyncio.Event()
        """Nothing is taken before it is set."""
        self.is_read.set()
        self.waiting = 0
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    def cancel(self) -> None:
        pass

    async def _send(self, contents: Sequence[bytes]) -> None:
        self.waiting += 1
        await self.is_read.wait()
        self.waiting -= 1
        self.sent += map(draft_pb2.ProposeRequest.FromString, contents)

    async def _receive(self) -> bytes:
        return await self.answers.get()

    def answer(self, proposal: Proposal) -> None:
        self.answers.put_nowait(wire.proposal_to_proto(proposal).SerializeToString())


@dataclass
class Tokens:
    """The part of a completion that a sequence uses."""

    token_ids: list[int]

    @property
    def length(self) -> int:
        return len(self.token_ids)


async def opened(stream: Stream) -> DraftSequence:
    """A sequence of four tokens that the draft has read, and has proposed two more for."""
    sequence = DraftSequence(stream, OPTIONS, LIMITS)
    sequence.begin(completion(4))
    stream.answer(Proposal(4))
    await settled()
    proposing = asyncio.create_task(sequence.propose(completion(4), 2, SECONDS))
    await settled()
    stream.answer(Proposal(4, (4, 5)))
    assert await proposing is not None
    return sequence


def completion(length: int) -> Completion:
    return cast("Completion", Tokens(list(range(length))))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_draft_that_does_not_read_is_told_no_more() -> None:
    """Rounds in which the target goes on alone leave one message to be read, however many they are."""
    stream = Stream()
    sequence = await opened(stream)
    stream.is_read.clear()
    tasks = len(asyncio.all_tasks())
    for length in range(5, 200):
        sequence.go_on(completion(length), Proposal(length), BUDGET)
        await settled()
    assert stream.waiting == 1
    assert len(asyncio.all_tasks()) <= tasks + 1
    assert not sequence.awaits_outcome(completion(200)), "the next round asks"
    assert await sequence.propose(completion(200), 3, 0.01, BUDGET) is None
    assert sequence.is_late
    stream.is_read.set()
    await settled()
    sent = stream.sent[-1].step
    assert (sent.delta.base_length, len(sent.delta.token_ids), sent.token_count) == (5, 195, 3)
    sequence.cancel()


async def test_answers_to_rounds_of_the_target_alone_are_passed_over() -> None:
    """An older draft gives them; later rounds wait for its proposals as before."""
    stream = Stream()
    sequence = await opened(stream)
    sequence.go_on(completion(5), Proposal(5), BUDGET)
    assert sequence.awaits_outcome(completion(6))
    stream.answer(Proposal(5))
    await settled()
    assert not sequence.awaits_outcome(completion(6)), "it will push nothing"
    proposing = asyncio.create_task(sequence.propose(completion(6), 2, SECONDS, BUDGET))
    await settled()
    stream.answer(Proposal(6, (6, 7)))
    proposal = await proposing
    assert proposal is not None
    assert proposal.token_ids == (6, 7)
    sequence.cancel()


@pytest.mark.parametrize("times", [1, 2])
async def test_other_answers_that_nobody_asked_for_are_refused(times: int) -> None:
    stream = Stream()
    sequence = await opened(stream)
    sequence.go_on(completion(5), Proposal(5), BUDGET)
    unasked: Any = Proposal(5) if times == 2 else Proposal(6)
    for _ in range(times):
        stream.answer(unasked)
    await settled()
    with pytest.raises(ProtocolError, match="proposed what nobody had asked for"):
        await sequence.propose(completion(6), 2, SECONDS, BUDGET)
    sequence.cancel()
