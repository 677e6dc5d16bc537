"""A draft that lies about what it drafted ahead loses its place; one that is old, late or far away costs nothing.

The target counts, so that an honest draft knows every outcome: all is accepted, and the next number follows.
"""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from tandem.clients.aio import Client
from tandem.serving.interceptors.handlers import Context
from tandem.types import DraftedOutcomes, GenerationRequest, ProposeStep, StepCost
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc
from tandem.wire import draft as wire
from tests.fault_proxy import fault_proxy
from tests.service.clients import Completed, complete, until
from tests.service.fakes import VOCABULARY_SIZE, FakeDraft, FakeTarget, coordinating, serving
from tests.service.served import NOT_SERVING, fleet

SECONDS = 60.0
TOKENS = 50
EXPECTED = tuple(range(11, 11 + TOKENS))
REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2)

Pushes = Iterator[draft_pb2.ProposeResponse]


class AheadDraft(FakeDraft):
    """Pushes the outcome that will come, a token at a time, as soon as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.granted = 0
        """Rounds for which it may push."""
        self.silent_from = 1 << 30
        """From this round on it says nothing more, neither answers nor outcomes."""

    def honest(self, tokens: list[int], step: ProposeStep) -> Iterator[DraftedOutcomes]:
        """What becomes of the round in which the last tokens are verified."""
        assert step.ahead is not None
        proposed = step.proposed_count or step.token_count
        base = len(tokens) - proposed
        bonus = tokens[-1] + 1
        for depth in range(step.ahead.token_count):
            keys = ((proposed,), (bonus,)) if depth == 0 else ((), ())
            yield DraftedOutcomes(base, depth, (bonus + 1 + depth,), *keys)

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        """What it pushes for the round. Tests override it to make it lie."""
        yield from map(wire.outcomes_to_proto, self.honest(tokens, step))

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        tokens: list[int] = []
        self.running += 1
        try:
            async for request in request_iterator:
                if request.HasField("open"):
                    self.open(request.open.max_length)
                    continue
                if request.HasField("finish"):
                    self.finished += 1
                    return
                step = wire.step_from_proto(request.step)
                self.apply(tokens, step.delta)
                if self.granted >= self.silent_from:
                    continue
                if step.is_answered:
                    self.asked.append(step.token_count)
                    answer = self.proposal(tokens, step.token_count)
                    tokens += answer.token_ids
                    yield answer
                if step.ahead is not None:
                    self.granted += 1
                    for push in self.pushes(tokens, step):
                        yield push
                        await asyncio.sleep(0)
        finally:
            self.running -= 1


@asynccontextmanager
async def cluster(
    draft: FakeDraft,
    *,
    ahead: DraftAhead = 4,
    step_seconds: float = 0.01,
    patience: float = 30.0,
    delay: float = 0.0,
) -> AsyncIterator[Client]:
    """A client of a coordinator over a target that counts and this draft, so many seconds away."""
    target = FakeTarget()
    target.step_seconds = step_seconds
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address, _ = await stack.enter_async_context(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
        )
        if delay:
            proxy = await stack.enter_async_context(fault_proxy(draft_address))
            proxy.delay_seconds, draft_address = delay, proxy.address
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=patience,
            speculation_policy="fixed",
            draft_ahead=ahead,
        )
        address = await stack.enter_async_context(coordinating(settings))
        yield await stack.enter_async_context(Client(address))
        await until(lambda: not draft.running, SECONDS)


async def completed(draft: FakeDraft, **options: float) -> Completed:
    async with cluster(draft, **options) as client:  # type: ignore[arg-type]
        return await complete(client, REQUEST)


def questions(draft: FakeDraft) -> int:
    """Steps for a proposal; those that only let it read the sequence do not count."""
    return sum(count > 0 for count in draft.asked)


STEP_SECONDS = 0.02


class StepwiseDraft(AheadDraft):
    """Takes so long for each depth of its outcomes."""

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        for each in self.honest(tokens, step):
            yield wire.outcomes_to_proto(replace(each, cost=StepCost(STEP_SECONDS, 1, 1)))

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async for answer in super().Propose(request_iterator, context):
            if answer.HasField("outcomes"):
                await asyncio.sleep(STEP_SECONDS)
            yield answer


async def test_an_honest_draft_is_asked_once() -> None:
    draft = AheadDraft()
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert done.stats.accepted == done.stats.drafted > TOKENS / 2
    assert questions(draft) + done.stats.ahead.hits <= done.stats.rounds
    assert done.stats.ahead.hits >= done.stats.rounds - 4, "but for the prompt's, the first and the last"
    assert draft.finished == 1


async def test_a_draft_that_does_not_know_it_is_asked_each_time() -> None:
    """As a draft before this version: it answers, and passes over what it is granted."""
    draft = FakeDraft()
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits == 0
    assert questions(draft) == done.stats.drafted / 2 > TOKENS / 4, "each proposal was asked for"
    assert done.stats.accepted == done.stats.drafted > TOKENS / 2


async def test_a_coordinator_that_does_not_know_it_is_told_nothing() -> None:
    draft = AheadDraft()
    done = await completed(draft, ahead="off")  # type: ignore[arg-type]
    assert done.token_ids == EXPECTED
    assert draft.granted == 0
    assert questions(draft) == done.stats.drafted / 2 > TOKENS / 4, "each proposal was asked for"


async def test_far_away_a_hit_waits_for_no_message() -> None:
    """20 ms one way, and steps of the target that outlast a round trip: nearly all rounds have hits."""
    draft = AheadDraft()
    done = await completed(draft, delay=0.02, step_seconds=0.1)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits >= done.stats.rounds / 2
    assert questions(draft) + done.stats.ahead.hits <= done.stats.rounds


async def test_a_round_waits_for_the_last_token_of_a_continuation() -> None:
    """One step of the draft ends before the verification, and the other one soon after it."""
    draft = StepwiseDraft()
    done = await completed(draft, step_seconds=1.6 * STEP_SECONDS)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits >= done.stats.rounds / 2
    assert done.stats.drafted >= 1.5 * done.stats.rounds, "most rounds verify both tokens"


async def test_a_draft_that_falls_silent_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """As one that was stopped: outcomes of the round in progress may be there, and none comes after them."""
    caplog.set_level(logging.INFO)
    draft = AheadDraft()
    draft.silent_from = 4
    done = await completed(draft, patience=0.1)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits > 0
    assert [record.message for record in caplog.records].count("draft late") == 1


@pytest.mark.parametrize("way", ["stops", "drains"])
async def test_a_draft_that_goes_while_outcomes_are_outstanding_is_replaced(way: str) -> None:
    target, drafts = FakeTarget(), [AheadDraft(), AheadDraft()]
    target.step_seconds = 0.03
    async with asyncio.timeout(SECONDS), fleet(target, *drafts, ahead=8) as (client, services):
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: sum(each.granted for each in drafts) > 2, SECONDS)
        going, other = sorted(services[1:], key=lambda each: -each.fake.running)
        await (going.stop() if way == "stops" else going.say(NOT_SERVING))
        await until(lambda: other.fake.running == 1, SECONDS)
        assert not task.done()
        done = await task
        await until(lambda: not any(each.running for each in drafts), SECONDS)
    assert done.token_ids == EXPECTED
    assert all(each.granted for each in drafts)


# ---- lies

Lie = Callable[[AheadDraft, list[int], ProposeStep], Pushes]


def wrong_keys(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Outcomes of more tokens than were proposed."""
    for each in draft.honest(tokens, step):
        counts = tuple(count + 5 for count in each.accepted_counts)
        yield wire.outcomes_to_proto(replace(each, accepted_counts=counts))


def wrong_tokens(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """The right outcome, continued with what the target would never say."""
    for each in draft.honest(tokens, step):
        yield wire.outcomes_to_proto(replace(each, token_ids=(7,)))


def unknown_tokens(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield wire.outcomes_to_proto(replace(each, token_ids=(VOCABULARY_SIZE,)))


def twice(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield from (wire.outcomes_to_proto(each), wire.outcomes_to_proto(each))


def same_outcome_twice(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    yield wire.outcomes_to_proto(
        replace(
            first,
            token_ids=first.token_ids * 2,
            accepted_counts=first.accepted_counts * 2,
            next_token_ids=first.next_token_ids * 2,
        )
    )


def of_the_future(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield wire.outcomes_to_proto(replace(each, base_length=each.base_length + 3))


def of_the_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Before the first round there was none whose outcomes could be late."""
    for each in draft.honest(tokens, step):
        yield wire.outcomes_to_proto(replace(each, base_length=each.base_length - 1))


def endless(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    (*_, last) = draft.honest(tokens, step)
    yield from map(wire.outcomes_to_proto, draft.honest(tokens, step))
    for depth in range(100_000):
        yield wire.outcomes_to_proto(replace(last, depth=last.depth + 1 + depth))


def endless_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for _ in range(100_000):
        yield from of_the_past(draft, tokens, step)


def malformed(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """A key of two halves, one of which is missing."""
    for push in map(wire.outcomes_to_proto, draft.honest(tokens, step)):
        push.outcomes.accepted_counts.append(0)
        yield push


def supports_without_bytes(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for push in map(wire.outcomes_to_proto, draft.honest(tokens, step)):
        push.outcomes.support_sizes.append(1 << 30)
        yield push


def too_many(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    many = tuple(range(500))
    yield wire.outcomes_to_proto(
        replace(first, token_ids=many, accepted_counts=(0,) * len(many), next_token_ids=many)
    )


def unasked_proposal(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    yield draft.proposal(tokens, 2)


HARMLESS: tuple[Lie, ...] = (wrong_tokens,)
FATAL: tuple[Lie, ...] = (
    wrong_keys,
    unknown_tokens,
    twice,
    same_outcome_twice,
    of_the_future,
    of_the_past,
    endless,
    endless_past,
    malformed,
    supports_without_bytes,
    too_many,
    unasked_proposal,
)


class Liar(AheadDraft):
    """Lies about what it drafted ahead; what it is asked it answers."""

    def __init__(self, lie: Lie) -> None:
        super().__init__()
        self._lie = lie

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        yield from self._lie(self, tokens, step)


@pytest.mark.parametrize("lie", [*HARMLESS, *FATAL], ids=lambda lie: lie.__name__)
async def test_a_lie_costs_the_draft_and_not_the_request(lie: Lie, caplog: pytest.LogCaptureFixture) -> None:
    draft = Liar(lie)
    done = await completed(draft, step_seconds=0.003)
    assert done.token_ids == EXPECTED
    lost = [record for record in caplog.records if record.message == "draft lost"]
    assert draft.granted > 0
    if lie in HARMLESS:
        assert not lost
    else:
        assert lost
        assert all(
            "draft service: " in vars(record)["reason"] or "outcomes" in vars(record)["reason"]
            for record in lost
        )
        assert draft.opened <= 1 + len(lost)
