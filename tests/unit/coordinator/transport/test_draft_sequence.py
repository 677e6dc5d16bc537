"""One sequence on a service: only differences travel, and a draft may not read, or answer what nobody asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ProtocolError
from tandem.model.types import (
    AheadBudget,
    Delta,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)
from tandem.v1 import draft_pb2
from tandem.wire import draft as wire
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.telemetry.observer import NO_OBSERVER
from tandem_coordinator.transport.draft_client import DraftLimits, DraftSequence
from tandem_coordinator.transport.proposals import check_proposal
from tandem_coordinator.transport.streams import RemoteSequence, Streams

BUDGET = AheadBudget(4, 3)
OPTIONS = DraftOptions("r", SamplingParams(temperature=0.0), ahead=BUDGET, row_kind=RowKind.TOKEN)
LIMITS = DraftLimits(vocabulary_size=100, num_speculative_tokens=3, keeps_proposals=False)
SECONDS = 20.0


@dataclass
class Service:
    """A draft service without a network: a test reads what is sent, and answers."""

    sent: list[wire.Request] = field(default_factory=list)
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is taken before it is set."""
    waiting: int = 0
    answers: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    async def write(self, content: bytes) -> None:
        self.waiting += 1
        await self.is_read.wait()
        self.waiting -= 1
        for _, request in wire.requests_from_proto(draft_pb2.ProposeRequest.FromString(content)):
            assert not isinstance(request, Exception)
            self.sent.append(request)

    async def read(self) -> bytes:
        return await self.answers.get()

    def cancel(self) -> bool:
        return True

    def answer(self, proposal: Proposal) -> None:
        self.answers.put_nowait(wire.answers_to_proto([(1, proposal)]).SerializeToString())

    @property
    def streams(self) -> Streams[Any, wire.Answer]:
        def read(content: bytes) -> Iterable[tuple[int, Any]]:
            return wire.answers_from_proto(draft_pb2.ProposeResponse.FromString(content))

        return Streams("draft service", lambda: cast("Any", self), wire.requests_to_proto, read)


async def opened(service: Service) -> DraftSequence:
    """A sequence of four tokens that the draft has read, and has proposed two more for."""
    service.is_read.set()
    sequence = DraftSequence(service.streams, OPTIONS, LIMITS, NO_OBSERVER)
    sequence.read(completion(4))
    service.answer(Proposal(4))
    await settled()
    proposing = asyncio.create_task(sequence.propose(completion(4), 2, SECONDS))
    await settled()
    service.answer(Proposal(4, (4, 5)))
    assert await proposing is not None
    return sequence


def completion(length: int) -> Completion:
    """The part of a completion that a sequence uses."""
    return cast("Completion", SimpleNamespace(token_ids=list(range(length)), length=length))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("ids", "probs", "words"),
    [
        ([1, 2], [0.5, 0.2], "sums to 0.7"),
        ([1, 2], [1.5, -0.5], "with nothing below 0"),
        ([1, 2], [math.nan, 0.5], "sums to nan"),
        ([1, 1], [0.5, 0.5], "names a token twice"),
        ([], [], "sums to 0"),
        ([2], [1.0], "gives no probability"),
        ([1, 100], [0.5, 0.5], "ids must be in 0..99"),
    ],
)
def test_what_no_token_can_be_drawn_from_is_refused(ids: list[int], probs: list[float], words: str) -> None:
    """As it travels, beside one that is right."""
    good = Proposal(4, (1,), (SparseDistribution(np.array([1, 2]), np.array([0.5, 0.5])),))
    bad = Proposal(4, (1,), (SparseDistribution(np.array(ids, np.int64), np.array(probs)),))
    message = wire.answers_to_proto([(1, bad), (2, good)])
    for number, answer in wire.answers_from_proto(message):
        assert isinstance(answer, Proposal)
        with pytest.raises(ProtocolError, match=words) if number == 1 else nullcontext():
            check_proposal("draft service", answer, 4, 1, 100, with_token_logits=False)


@pytest.mark.parametrize(
    ("proposal", "words"),
    [
        (Proposal(3, (1,)), "extends 3 tokens; it must extend 4"),
        (Proposal(4, (1, 2)), "proposed 2 tokens; at most 1"),
        (Proposal(4, (100,)), "proposed token id 100; ids must be in 0..99"),
        (Proposal(4, (-1,)), "proposed token id -1"),
        (Proposal(4, (1,)), "sent no logits"),
    ],
)
def test_a_proposal_that_nobody_asked_for_is_refused(proposal: Proposal, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        check_proposal("draft service", proposal, 4, 1, 100, with_token_logits=True)


async def test_a_draft_that_does_not_read_is_told_no_more() -> None:
    """Rounds in which the target goes on alone leave one message to be read, however many they are."""
    service = Service()
    sequence = await opened(service)
    service.is_read.clear()
    for length in range(5, 200):
        sequence.go_on(completion(length), Proposal(length), BUDGET)
        await settled()
    assert service.waiting == 1
    assert not sequence.outcomes.awaits(completion(200).token_ids), "the next round asks"
    assert await sequence.propose(completion(200), 3, 0.01, BUDGET) is None
    assert sequence.is_late
    service.is_read.set()
    await settled()
    step = service.sent[-1]
    assert isinstance(step, ProposeStep)
    assert (step.delta.base_length, len(step.delta.token_ids), step.token_count) == (5, 195, 3)
    sequence.cancel()


@pytest.mark.parametrize("unasked", [Proposal(5), Proposal(6)])
async def test_answers_that_nobody_asked_for_are_refused(unasked: Proposal) -> None:
    """A step that only grants a budget has no answer of its own."""
    service = Service()
    sequence = await opened(service)
    sequence.go_on(completion(5), Proposal(5), BUDGET)
    service.answer(unasked)
    await settled()
    with pytest.raises(ProtocolError, match="proposed what nobody had asked for"):
        await sequence.propose(completion(6), 2, SECONDS, BUDGET)
    sequence.cancel()


def applied(tokens: list[int], delta: Delta) -> list[int]:
    assert delta.base_length <= len(tokens), "a delta must not leave a gap"
    return [*tokens[: delta.base_length], *delta.token_ids]


def test_kept_tokens_are_those_that_the_service_holds_and_that_were_committed() -> None:
    remote = RemoteSequence()
    remote.delta_to([1, 2, 3], [4, 5])
    assert remote.kept_length([1, 2, 3, 4, 9]) == 4
    assert remote.kept_length([1, 2, 3, 4, 5, 6]) == 5
    assert remote.kept_length([1, 2, 3]) == 3


rounds = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4),  # the proposal
        st.integers(0, 4),  # how much of it is accepted
        st.integers(0, 2),  # the token after it
        st.booleans(),  # True if the service proposed it, and so has it outside the sequence
    ),
    max_size=12,
)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), rounds)
def test_the_service_always_holds_the_coordinators_sequence(
    prompt: list[int], script: list[tuple[list[int], int, int, bool]]
) -> None:
    remote = RemoteSequence()
    committed = list(prompt)
    held: list[int] = []
    for proposal, accepted, next_token, by_service in script:
        if by_service:
            held = applied(held, remote.delta_to(committed))
            assert held == committed
        else:
            held = applied(held, remote.delta_to(committed, proposal))
            assert held == committed + proposal
        committed += [*proposal[:accepted], next_token]
