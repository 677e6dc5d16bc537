"""A target that goes on before it is asked: alone, or with the proposals that the draft makes ahead."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import grpc
import pytest

from tandem.clients.client import Completed
from tandem.engine.interface import KvUsage, RowRequest
from tandem.engine.models.loading import LoadedModel
from tandem.errors import TandemError
from tandem.model.leading import Leading, read_outcome
from tandem.model.types import (
    Delta,
    GenerationRequest,
    GoesOn,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    TokenRow,
    Verification,
)
from tandem.telemetry.streams import NO_SERVICE_OBSERVER
from tandem_coordinator.service import CoordinatorService
from tandem_draft.proposers.ngram import ngram_proposer
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_load.fakes import FakeTarget, counting, rows
from tandem_target.servicer import TargetServicer, VerifiedFor
from tandem_target.verifier import Verifier
from tests.service.clients import complete, until
from tests.service.engines import Fault, Faults, NewProposer, model_free, pair
from tests.service.fakes import HANG_SECONDS, Fleet, coordinated, fleet, refusal, served
from tests.service.test_ahead_fakes import (
    EXPECTED,
    REQUEST,
    AheadDraft,
    Pushes,
    ViolatingDraft,
    Violation,
    wrong_tokens,
)


@dataclass(eq=False)
class Led:
    tokens: list[int] = field(default_factory=list)
    allowed: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    leading: asyncio.Task[None] | None = None

    def end_lead(self) -> None:
        if self.leading is not None:
            self.leading.cancel()


class LeadingEngine:
    """Takes steps as the real engines do, each sequence by itself.

    A step that may lead to others lasts until the draft has pushed what follows its outcome, where that is expected:
    so it is known which steps begin by themselves.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.patience_seconds = 10.0
        """How long to wait for an outcome at most; 0 where it may never come."""
        self.open_count = 0
        self.usage = KvUsage(0, 0, 0, 0, 0)

    async def open(self, max_length: int, *, client: str = "", scope: str = "") -> Led:
        self.open_count += 1
        return Led()

    def waits_for_pages(self, sequence: Led) -> bool:
        return False

    def release(self, sequence: Led) -> None:
        self.open_count -= 1
        sequence.end_lead()

    async def run(self, sequence: Led, request: RowRequest) -> Verification:
        sequence.end_lead()
        sequence.allowed = request.step.lead
        answer = await self._step(sequence, request)
        sequence.leading = asyncio.create_task(self._lead(sequence, request.following(answer)))
        return answer

    def grant(self, sequence: Led, asked: int, lead: int) -> None:
        sequence.allowed = asked + lead
        sequence.more.set()

    async def _lead(self, sequence: Led, request: RowRequest | None) -> None:
        number = 0
        while request is not None:
            number += 1
            while number > sequence.allowed:
                sequence.more.clear()
                await sequence.more.wait()
            assert request.on_led is not None
            try:
                answer = await self._step(sequence, request)
            except TandemError as error:
                request.on_led(request, error)
                return
            proposal = Proposal(answer.base_length, tuple(request.step.delta.token_ids[1:]))
            request.on_led(request, replace(answer, proposal=proposal))
            request = request.following(answer)

    async def _step(self, sequence: Led, request: RowRequest) -> Verification:
        step = request.step
        tokens = sequence.tokens
        tokens[step.delta.base_length :] = step.delta.token_ids
        base_length = request.base_length
        said = [counting(tokens[:length]) for length in range(base_length, len(tokens) + 1)]
        answer = Verification(base_length, rows(said, step))
        if step.lead and step.row_kind is RowKind.TOKEN:
            await self._outcomes(request, answer)
        await asyncio.sleep(0)
        return request.go_on(answer)[0]

    async def _outcomes(self, request: RowRequest, answer: Verification) -> None:
        """Wait until the draft has pushed what follows the outcome, unless the sequence ends there."""
        until = asyncio.get_running_loop().time() + self.patience_seconds
        outcome = read_outcome(request.step, answer)
        if Leading().find(outcome, request.options) is None:
            return
        while asyncio.get_running_loop().time() < until:
            if request.leading.find(outcome, request.options) is not None:
                return
            await asyncio.sleep(0.001)


class LeadingTarget(FakeTarget):
    def __init__(self) -> None:
        super().__init__()
        self._observer = NO_SERVICE_OBSERVER
        self.engine = LeadingEngine(self.model_info)
        self.verifier = Verifier(cast("Any", self.engine), self.tokenizer_files)

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        self.opened += 1
        await TargetServicer.serve_sequence(self, sequence)


@asynccontextmanager
async def leading(target: LeadingTarget, draft: AheadDraft, lead: int = 2) -> AsyncIterator[Fleet]:
    async with fleet(target, draft, draft_ahead=4, target_lead=lead) as running:
        yield running
        await until(lambda: not target.engine.open_count and not draft.running)


STRICT = replace(REQUEST, temperature=1.0, seed=3, rejection_sampling_strategy="strict")
RULES = {"greedy": REQUEST, "strict": STRICT}


@pytest.mark.parametrize("lead", [0, 1, 8])
async def test_each_round_behind_a_proposal_begins_by_itself(lead: int) -> None:
    target = LeadingTarget()
    draft = AheadDraft()
    async with leading(target, draft, lead) as running:
        for rule, request in RULES.items():
            draft.requested.clear()
            done = await complete(running.client, request)
            stats = done.speculation
            assert done.token_ids == EXPECTED, rule
            assert (stats.lead.wasted, stats.accepted) == (0, stats.drafted), rule
            if not lead:
                assert stats.lead.rounds == 0, rule
                continue
            assert sum(draft.requested) == 2, "the first proposal"
            # All but that of the prompt, and the one that asked for a proposal.
            assert stats.lead.rounds == stats.rounds - 2, rule
            assert stats.ahead.hits >= stats.rounds - 3, "the last one has no room for a proposal"
        many = [replace(STRICT, seed=seed) for seed in range(16)]
        found = await asyncio.gather(*(complete(running.client, each) for each in many))
        assert [each.token_ids for each in found] == [EXPECTED] * 16


@pytest.mark.parametrize("lead", [1, 8])
async def test_a_completion_ends_at_the_same_token_wherever_that_lies_in_a_lead(lead: int) -> None:
    target = LeadingTarget()
    draft = AheadDraft()
    request = replace(REQUEST, prompt=(400,))
    expected = tuple(range(401, 413))
    async with leading(target, draft, lead) as running:
        whole = await complete(running.client, replace(request, max_tokens=12))
        assert whole.token_ids == expected
        stats = running.coordinator.completions.stats
        for n in range(1, 12):
            by_id = await complete(running.client, replace(request, stop_token_ids=(expected[n],)))
            by_length = await complete(running.client, replace(request, max_tokens=n + 1))
            assert by_id.token_ids == by_length.token_ids == expected[: n + 1]
        assert stats.snapshot()[0].lead.wasted == 0, "the target knows these ends"
        for n in range(1, len(whole.text)):
            by_text = await complete(running.client, replace(request, stop=(whole.text[:n],)))
            assert by_text.text == ""
        assert 0 < stats.snapshot()[0].lead.wasted <= lead * len(whole.text)


def other_outcome(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Draft for an outcome that does not come."""
    for each in draft.honest(tokens, step):
        yield replace(each, next_token_ids=tuple(token_id + 1 for token_id in each.next_token_ids))


def rejected(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Draft for a rejection that does not come."""
    for each in draft.honest(tokens, step):
        yield replace(each, accepted_counts=tuple(0 for _ in each.accepted_counts))


@pytest.mark.parametrize("lie", [wrong_tokens, other_outcome, rejected], ids=lambda lie: lie.__name__)
async def test_what_a_draft_pushes_never_changes_the_text(lie: Violation) -> None:
    target = LeadingTarget()
    draft = ViolatingDraft(lie)
    target.engine.patience_seconds = 0.005
    async with leading(target, draft) as running:
        for request in RULES.values():
            done = await complete(running.client, request)
            assert done.token_ids == EXPECTED
            assert done.speculation.lead.wasted == 0, "what is rejected is no waste of the lead's"


async def test_a_target_lets_go_of_a_lead_when_its_coordinator_is_gone() -> None:
    target = LeadingTarget()
    draft = AheadDraft()
    async with asyncio.timeout(HANG_SECONDS), served(target, draft) as services:
        addresses = [each.address for each in services]
        async with coordinated(*addresses, draft_ahead=4) as (client, _):
            chunks = client.generate(REQUEST)
            while not (await anext(chunks)).drafted_ahead:
                pass
            assert target.engine.open_count == 1
        await chunks.aclose()
        await until(lambda: not target.engine.open_count)
        async with coordinated(*addresses, draft_ahead=4) as (client, _):
            assert (await complete(client, REQUEST)).token_ids == EXPECTED


LEADS = (1, 8)
GREEDY = GenerationRequest("def f(", max_tokens=12, temperature=0.0, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    **{
        f"{rule}, temperature {temperature}": replace(
            GREEDY, temperature=temperature, seed=seed, rejection_sampling_strategy=rule
        )
        for seed, (rule, temperature) in enumerate(itertools.product(("strict", "residual", "block"), (0.7, 1.0)))
    },
    "penalties, biases and a minimum": replace(
        GREEDY, temperature=1.0, seed=9, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={300: 5.0},
        min_tokens=6, ignore_eos=False,
    ),
}  # fmt: skip
MODEL_FREE = ("greedy", "strict, temperature 0.7", "strict, temperature 1.0")
"""Requests whose rule may have a lead beside a draft."""


async def completions(
    model: LoadedModel, lead: int, requests: Iterable[GenerationRequest], *faults: Faults
) -> list[Completed]:
    """By a target for each set of faults, without a draft."""
    async with pair(model, None, *faults, target_lead=lead) as (client, _):
        return [await complete(client, request) for request in requests]


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> dict[str, Completed]:
    found = asyncio.run(completions(model, 0, REQUESTS.values()))
    assert all(each.speculation.lead.rounds == 0 for each in found)
    return dict(zip(REQUESTS, found, strict=True))


@pytest.mark.parametrize("lead", LEADS)
async def test_the_text_does_not_depend_on_the_lead(
    model: LoadedModel, plain: dict[str, Completed], lead: int
) -> None:
    """Nor on how many streams there are."""
    names = [*REQUESTS] * 2
    async with pair(model, None, target_lead=lead, max_sequences=16) as (client, _):
        completed = await asyncio.gather(*(complete(client, REQUESTS[name]) for name in names))
    for name, found in zip(names, completed, strict=True):
        assert (found.text, found.token_ids) == (plain[name].text, plain[name].token_ids), name
        # Every round but the first, which the request asks for.
        assert found.speculation.lead.rounds == len(found.token_ids) - 1, name


@pytest.mark.parametrize("new", [ngram_proposer, suffix_proposer])
async def test_the_text_does_not_depend_on_the_lead_with_a_draft_without_a_model(
    model: LoadedModel, new: NewProposer
) -> None:
    """Matches in the prompt are proposed; in the rounds of the target alone it leads."""
    biases = {300: 40.0, 301: 40.0, 302: 40.0}
    requests = [replace(REQUESTS[name], prompt=(*biases,) * 4, logit_bias=biases) for name in MODEL_FREE]
    wanted = await completions(model, 0, requests)
    for lead in (0, 2):
        async with pair(model, model_free(new, prompt_lookup_min=1), target_lead=lead) as (client, _):
            for request, plain in zip(requests, wanted, strict=True):
                found = await complete(client, request)
                alone = await complete(client, replace(request, speculation=False))
                assert found.token_ids == alone.token_ids == plain.token_ids
                assert found.speculation.drafted > 0
                assert (alone.speculation.lead.rounds > 0) == (lead > 0)


def lost_at(count: int, *, is_answered: bool) -> Faults:
    """A target that is lost once, with its step or its answer of this number, from 1 on."""
    faults = Faults(before=set() if is_answered else {count})

    def broken(answer: Verification) -> Verification:
        if faults.answers == count:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        return answer

    if is_answered:
        faults.garbled = dict.fromkeys(range(100), broken)
    return faults


def are_ready(service: CoordinatorService) -> bool:
    """The coordinator knows that all targets are ready."""
    return all(member.is_ready for member in service.replicas.targets.members.values())


@pytest.mark.parametrize("is_answered", [False, True])
async def test_the_text_survives_a_loss_in_the_middle_of_a_lead(
    model: LoadedModel, plain: dict[str, Completed], is_answered: bool
) -> None:
    names = ("greedy", "strict, temperature 1.0", "residual, temperature 0.7")
    for (lead, step), name in itertools.product(((1, 1), (8, 2), (8, 7)), names):
        faulty = [lost_at(number, is_answered=is_answered) for number in (step, 3)]
        async with pair(model, None, *faulty, target_lead=lead) as (client, service):
            await until(partial(are_ready, service))  # else the one that was lost would be asked again
            found = await complete(client, REQUESTS[name])
        assert found.token_ids == plain[name].token_ids
        opened = [each.opened for each in faulty]
        steps = [each.steps for each in faulty]
        assert sum(opened) == 3, (
            f"{name}, lead {lead}: {opened} opened in {steps} steps; one, and one for each loss"
        )


def going_on(
    answer: Verification, last: int = 0, more: tuple[int, ...] = (), length: int = 0
) -> GoesOn | None:
    """The step with which a target says that it goes on, changed; None where it does not go on."""
    if answer.goes_on is None:
        return None
    delta = answer.goes_on.delta
    first, *proposed = delta.token_ids
    return GoesOn(Delta(delta.base_length + length, (first + last, *proposed, *more)))


LIES: dict[str, Fault] = {
    "another token than the rows named": lambda each: replace(each, goes_on=going_on(each, last=1)),
    "another proposal than it had said": lambda each: replace(
        each, proposal=Proposal(each.base_length, (1, 2))
    ),
    "a token is skipped": lambda each: replace(each, base_length=each.base_length + 1),
    "a row of no model of this vocabulary": lambda each: replace(each, rows=(TokenRow(1 << 20),)),
    "a proposal that nobody has made": lambda each: replace(each, goes_on=going_on(each, more=(1, 2))),
    "a place that it cannot be at": lambda each: replace(each, goes_on=going_on(each, length=1)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_target_whose_lead_contradicts_its_rows_is_left(
    model: LoadedModel, plain: dict[str, Completed], lie: str
) -> None:
    def lied(answer: Verification) -> Verification:
        return answer if answer.proposal is None else LIES[lie](answer)

    lying = Faults(garbled=dict.fromkeys(range(4, 100), lied))
    (found,) = await completions(model, 2, [GREEDY], lying, Faults())
    assert found.token_ids == plain["greedy"].token_ids
    lying.steps = 0
    with pytest.raises(TandemError, match="no target service could go on"):
        await completions(model, 2, [GREEDY], lying)
