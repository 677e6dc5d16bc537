"""A lost, late, faulty or useless draft costs only the speed-up while that lasts; a draining draft is left."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from tandem.engine.core import engine as core_engine
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError, TandemError
from tandem.model.replica import ReplicaState
from tandem.model.types import FinishReason, GenerationRequest, Proposal
from tandem.serving.interceptors import Context
from tandem.v1 import draft_pb2
from tests.service.clients import complete, until
from tests.service.engines import pair
from tests.service.fakes import NOT_SERVING, SERVING, FakeDraft, FakeTarget, cluster, fleet, paced, refusal

TOKENS = 50
EXPECTED = tuple(range(11, 11 + TOKENS))
REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2, seed=1)


class Failing(FakeDraft):
    """Fails at some steps, counted over all its streams."""

    def __init__(self, *steps: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__()
        self._steps = steps
        self._code = code

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        if len(self.requested) in self._steps:
            raise refusal(self._code, "failed")
        return self.proposal(tokens, count)


class Hanging(FakeDraft):
    """Answers as many steps as this and no more. Before the first it is as one that has no room yet."""

    def __init__(self, answered: int) -> None:
        super().__init__()
        self._answered = answered

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        if len(self.requested) > self._answered:
            await asyncio.Event().wait()
        return self.proposal(tokens, count)


class Useless(FakeDraft):
    """A slow draft whose proposals are always rejected."""

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        await asyncio.sleep(0.005)
        return self.proposal(tokens, count)


def useless() -> FakeDraft:
    return Useless(lambda tokens: 7)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_another_draft_takes_over(code: grpc.StatusCode) -> None:
    failing = Failing(*range(3, 99), code=code)
    other = FakeDraft()
    async with fleet(FakeTarget(), failing, other) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert other.requested[0] == 0, "it reads the sequence while the target works"
    assert completed.speculation.accepted == completed.speculation.drafted > TOKENS / 2


@pytest.mark.parametrize(("step", "opened"), [(10, 1), (17, 0)])
async def test_no_other_draft_takes_over_for_the_last_few_tokens(step: int, opened: int) -> None:
    failing = Failing(*range(step, 99))
    other = FakeDraft()
    async with fleet(FakeTarget(), failing, other) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert other.opened == opened


async def test_a_draft_that_returns_is_used_again() -> None:
    # The target must not finish before the draft's health was checked.
    target = paced(0.02)
    draft = Failing(3, 8)
    async with fleet(target, draft) as (client, *_):
        completed = await complete(client, REQUEST)
    assert completed.token_ids == EXPECTED
    assert draft.opened == 3
    assert completed.speculation.accepted == completed.speculation.drafted > 0


@pytest.mark.parametrize(
    ("answered", "opened"),
    # The second may be full; a request that moved to another full draft would lose its place in the queue.
    [(2, (1, 1)), (0, (1, 0))],
)
async def test_a_hanging_draft_is_replaced_and_one_that_has_no_room_yet_is_not(
    answered: int, opened: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_coordinator.rounds.placement.ABANDON_SECONDS", 0.1)
    target = paced(0.02)
    drafts = (Hanging(answered), FakeDraft())
    async with fleet(target, *drafts, draft_patience_seconds=0.05) as (client, services, service):
        await services[2].say(NOT_SERVING)
        states = service.replicas.snapshots
        await until(lambda: any(each.state is ReplicaState.DRAINING for each in states()))
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: drafts[0].opened == 1)
        await services[2].say(SERVING)
        assert (await task).token_ids == EXPECTED
        await until(lambda: not drafts[0].running)
    assert (drafts[0].opened, drafts[1].opened) == opened


async def test_a_paused_request_leaves_a_draft_that_drains() -> None:
    target = paced(0.04)
    draft = useless()
    async with fleet(target, draft, speculation_policy="adaptive") as (client, services, _):
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: target.longest > TOKENS // 2)
        await services[1].say(NOT_SERVING)
        await until(lambda: not draft.running)
        assert not task.done()
        assert (await task).token_ids == EXPECTED


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_draining_draft_is_left_between_two_rounds(role: str) -> None:
    """It still answers, so no proposal is lost."""
    fakes = (FakeTarget(), FakeTarget(), FakeDraft(), FakeDraft())
    for target in fakes[:2]:
        target.step_seconds = 0.02
    async with fleet(*fakes) as (client, services, _):
        task = asyncio.create_task(complete(client, REQUEST))
        pair = services[:2] if role == "target" else services[2:]
        await until(lambda: any(each.fake.running for each in pair))
        draining, other = sorted(pair, key=lambda each: -each.fake.running)
        await draining.say(NOT_SERVING)
        await until(lambda: not draining.fake.running)
        assert not task.done()
        await until(lambda: other.fake.running == 1)
        completed = await task
    assert completed.token_ids == EXPECTED
    assert completed.speculation.accepted == completed.speculation.drafted > 0


PATIENCE_SECONDS = 0.05


class Late(FakeDraft):
    """Answers once after the coordinator's patience is over, and in time before and after."""

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        if len(self.requested) == 2:
            await asyncio.sleep(3 * PATIENCE_SECONDS)
        return self.proposal(tokens, count)


class Leaving(FakeDraft):
    async def respond(self, tokens: Sequence[int], count: int) -> Proposal | None:
        return None if len(self.requested) > 2 else self.proposal(tokens, count)


class Garbled(FakeDraft):
    async def respond(self, tokens: Sequence[int], count: int) -> Proposal:
        proposal = self.proposal(tokens, count)
        return replace(proposal, base_length=0) if len(self.requested) > 2 else proposal


class GarbledParts(FakeDraft):
    async def Propose(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async for response in super().Propose(request_iterator, context):
            if len(self.requested) > 2:
                for part in response.parts:
                    if part.HasField("proposal"):
                        part.proposal.distributions.add(token_ids=[1, 2], probabilities=[1.0])
            yield response


FAULTS: dict[str, Callable[[], FakeDraft]] = {
    "hanging": lambda: Hanging(0),
    "hanging later": lambda: Hanging(2),
    "late": Late,
    "refusing": lambda: Failing(*range(1000), code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    "dying": lambda: Failing(*range(3, 1000)),
    "leaving": Leaving,
    # Each rule for proposals, and for parts of messages, is broken once in the tests of `check_proposal` and of `wire`.
    "a wrong proposal": Garbled,
    "a distribution that does not fit together": GarbledParts,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_draft_leaves_the_targets_own_tokens(fault: str) -> None:
    request = GenerationRequest((10,), max_tokens=30, num_speculative_tokens=2, seed=1)
    draft = FAULTS[fault]()
    async with cluster(FakeTarget(), draft, draft_patience_seconds=PATIENCE_SECONDS) as client:
        for temperature in (1.0, 0.0):
            completed = await complete(client, replace(request, temperature=temperature))
            assert completed.token_ids == tuple(range(11, 41))
            assert completed.finish_reason is FinishReason.LENGTH
        await until(lambda: not draft.running)


async def test_a_late_answer_is_dropped_and_the_draft_is_used_again() -> None:
    """The late answer proposes tokens of a finished round; as an answer to a later round it would be invalid."""
    # The target must not finish before the draft answers again.
    target = paced(PATIENCE_SECONDS / 2)
    draft = Late()
    async with cluster(target, draft, draft_patience_seconds=PATIENCE_SECONDS) as client:
        completed = await complete(client, GenerationRequest((10,), max_tokens=50, temperature=0.0))
    assert len(draft.requested) > 2
    assert completed.speculation.accepted == completed.speculation.drafted > 0


async def test_non_finite_logits_of_the_target_end_the_request_with_internal(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = core_engine.row_head
    calls = itertools.count()

    def spoilt(ready: Any, logits: Tensor, **named: Any) -> Any:
        return head(ready, logits * torch.nan if next(calls) > 1 else logits, **named)

    monkeypatch.setattr(core_engine, "row_head", spoilt)
    async with pair(model, model) as (client, _):
        with pytest.raises(TandemError) as raised, caplog.at_level(logging.ERROR):
            await complete(client, REQUEST)
    assert isinstance(raised.value, ProtocolError) or type(raised.value) is TandemError
    lines = [record for record in caplog.records if record.message == "logits are not finite"]
    assert len(lines) == 1
    assert "not finite numbers" in str(lines[0].__dict__["reason"])
    assert lines[0].exc_info is None
