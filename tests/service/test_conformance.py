"""`tandem doctor draft`: our drafts pass every check, and for each check there is a fault that it finds."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import grpc.aio
import numpy as np
import pytest

from coordinator.transport.conformance import CHECKS, Subject, conformance
from coordinator.transport.draft_client import DraftClient
from draft_service.proposers import Proposer
from draft_service.proposers.model_free import SequenceLimits
from draft_service.proposers.ngram import ngram_proposer
from draft_service.proposers.suffix import suffix_proposer
from draft_service.servicer import DraftedFor, DraftServicer
from tandem.admin import Severity
from tandem.config.speculative import DraftingOptions
from tandem.engine.models.loading import LoadedModel
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.serving.interceptors import Context
from tandem.types import DraftedOutcomes, Proposal, ProposeStep, SparseDistribution
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2 import (
    DraftServiceGetModelInfoRequest,
    DraftServiceGetModelInfoResponse,
    ProposeRequest,
    ProposeResponse,
)
from tests.commands import run_here
from tests.paths import ROOT
from tests.service.engines import draft
from tests.service.fakes import NOT_SERVING, hooked, served, serving

Answer = Proposal | DraftedOutcomes
NewProposer = Callable[[DraftingOptions, SequenceLimits], Proposer]
SECONDS = 30.0
"""An answer may take so long, where one comes."""


async def problems(address: str) -> list[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        findings = await conformance(channel, SECONDS)
    assert [each.check for each in findings] == list(CHECKS)
    return [f"{each.check}: {each.detail}" for each in findings if each.severity is not Severity.OK]


async def test_a_draft_model_conforms(model: LoadedModel) -> None:
    async with draft(model) as (address, _):
        assert await problems(address) == []


def model_free(servicer: DraftServicer, new: NewProposer = ngram_proposer) -> DraftServicer:
    """Have it draft without a model."""
    servicer.proposer = new(DraftingOptions(), SequenceLimits(64))
    return servicer


@pytest.mark.parametrize("new", [ngram_proposer, suffix_proposer])
async def test_a_draft_without_a_model_conforms(new: NewProposer) -> None:
    async with serving(model_free(DraftServicer(), new)) as (address, _):
        assert await problems(address) == []


# ---- faults


class Faulty(DraftServicer):
    """A draft that is right but for what its subclass does."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.last: ProposeStep | None = None
        self.rolled_back = False

        def on_step(step: ProposeStep) -> None:
            last, self.last = self.last, step
            self.rolled_back = last is not None and 0 < step.delta.base_length < last.delta.length

        await super().serve_sequence(hooked(sequence, on_step, self._answer))

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        async def requests() -> AsyncIterator[ProposeRequest]:
            async for message in request_iterator:
                self.request(message)
                yield message

        async for response in super().Propose(requests(), context):
            self.response(response)
            yield response

    def _answer(self, answer: Answer) -> Answer:
        return self.proposal(answer) if isinstance(answer, Proposal) else self.outcomes(answer)

    def proposal(self, proposal: Proposal) -> Proposal:
        """Answer with this."""
        return proposal

    def outcomes(self, outcomes: DraftedOutcomes) -> DraftedOutcomes:
        """Push this."""
        return outcomes

    def request(self, message: ProposeRequest) -> None:
        """A message arrives."""

    def response(self, message: ProposeResponse) -> None:
        """A message is sent."""


def shifted(proposal: Proposal) -> Proposal:
    """Propose something else."""
    return replace(
        proposal, token_ids=tuple(token_id ^ 1 for token_id in proposal.token_ids), distributions=()
    )


class Nameless(Faulty):
    async def GetModelInfo(
        self, request: DraftServiceGetModelInfoRequest, context: Context
    ) -> DraftServiceGetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        answer.model_info.tokenizer_hash = ""
        return answer


class Talkative(Faulty):
    """Proposes a token where none is asked for."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, token_ids=(*proposal.token_ids, 1))


class Misplaced(Faulty):
    """Answers with the length after the proposal."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, base_length=proposal.base_length + 1)


class Chatty(Faulty):
    """Sends distributions unasked."""

    def proposal(self, proposal: Proposal) -> Proposal:
        sure = tuple(SparseDistribution(np.array([each]), np.ones(1)) for each in proposal.token_ids)
        return replace(proposal, distributions=sure)


class Unseeded(Faulty):
    """Draws otherwise each time."""

    def proposal(self, proposal: Proposal) -> Proposal:
        self.turn = not getattr(self, "turn", False)
        return shifted(proposal) if self.turn else proposal


class Unlikely(Faulty):
    """Proposes tokens to which its distributions give no probability."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, token_ids=(0,) * len(proposal))


class WithoutLogits(Faulty):
    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, token_logits=None)


class Twice(Faulty):
    """Answers each step twice."""

    def response(self, message: ProposeResponse) -> None:
        message.proposals.extend(list(message.proposals))


class Forgetful(Faulty):
    """Takes a repeated delta for more tokens."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return shifted(proposal) if self.last is not None and self.last.delta.base_length else proposal


class Stuck(Faulty):
    """Keeps what was rolled back."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return shifted(proposal) if self.rolled_back else proposal


class Vague(Faulty):
    """Ends sequences with a status of its own."""

    def response(self, message: ProposeResponse) -> None:
        for end in message.ends:
            end.code = end.code and grpc.StatusCode.INTERNAL.value[0]


class Endless(Faulty):
    """Proposes as much as it is asked for."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        async for step in sequence.steps():
            await sequence.answer(Proposal(step.delta.length, (1,) * min(step.token_count, 5000)))


class Tolerant(Faulty):
    """Passes over an Open of a sequence that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: set[int] = set()

    def request(self, message: ProposeRequest) -> None:
        kept = [each for each in message.opens if each.sequence not in self.opened]
        del message.opens[:]
        message.opens.extend(kept)
        self.opened |= {each.sequence for each in kept}


class Careless(Faulty):
    """Ends a stream that it cannot read as if nothing were wrong."""

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        try:
            async for response in super().Propose(request_iterator, context):
                yield response
        except InvalidRequestError:
            return


class Mute(Faulty):
    """Does not say that a sequence has ended."""

    def response(self, message: ProposeResponse) -> None:
        del message.ends[:]


class Repeating(Faulty):
    """Says again, with each message, that the first sequence has ended."""

    def response(self, message: ProposeResponse) -> None:
        message.ends.add(sequence=1)


class Fragile(Faulty):
    """Breaks the stream with a cancelled sequence."""

    def request(self, message: ProposeRequest) -> None:
        if message.cancelled_sequences:
            raise InvalidRequestError("cancelled")


class Clinging(Faulty):
    """Keeps a stream that has ended."""

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        async for response in super().Propose(request_iterator, context):
            yield response
        await asyncio.Event().wait()


class Generous(Faulty):
    """Pushes more than it was granted."""

    def outcomes(self, outcomes: DraftedOutcomes) -> DraftedOutcomes:
        if outcomes.depth:
            return outcomes
        more = range(100)
        return replace(
            outcomes,
            token_ids=outcomes.token_ids + (1,) * len(more),
            accepted_counts=outcomes.accepted_counts + (0,) * len(more),
            next_token_ids=outcomes.next_token_ids + tuple(more),
        )


class Stale(Faulty):
    """Pushes outcomes of a round that has not begun."""

    def outcomes(self, outcomes: DraftedOutcomes) -> DraftedOutcomes:
        return replace(outcomes, base_length=outcomes.base_length + 1)


class Boundless(Faulty):
    """Takes any budget."""

    def request(self, message: ProposeRequest) -> None:
        for each in message.opens:
            each.ClearField("ahead")


FAULTS: list[tuple[str, type[Faulty]]] = [
    ("model", Nameless),
    ("reading", Talkative),
    ("proposals", Misplaced),
    ("token rows", Chatty),
    ("distributions", Unseeded),
    ("distributions", Unlikely),
    ("token logits", WithoutLogits),
    ("order", Twice),
    ("idempotence", Forgetful),
    ("rollback", Stuck),
    ("malformed", Vague),
    ("huge", Endless),
    ("opening", Tolerant),
    ("torn", Careless),
    ("finish", Mute),
    ("stale", Repeating),
    ("cancel", Fragile),
    ("half-closed", Clinging),
    ("ahead", Generous),
    ("ahead", Stale),
    ("budgets", Boundless),
]


def test_each_check_has_a_fault() -> None:
    assert {name for name, _ in FAULTS} | {"health", "unchanged"} == set(CHECKS)


async def fails(address: str, name: str) -> None:
    """The check finds a fault, and not because nothing works."""
    async with grpc.aio.insecure_channel(address) as channel:
        info = await DraftClient(channel).model_info()
        with pytest.raises((ProtocolError, InvalidRequestError)) as caught:
            await CHECKS[name](Subject(channel, info, 2.0))
        if name != "proposals":
            await CHECKS["reading" if name != "reading" else "health"](Subject(channel, info, SECONDS))
    assert "UNAVAILABLE" not in str(caught.value)


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda each: getattr(each, "__name__", each))
async def test_a_fault_is_found(name: str, fault: type[Faulty], model: LoadedModel) -> None:
    async with draft(model, fault()) as (address, _):
        await fails(address, name)


async def test_a_draft_that_does_not_serve_is_found() -> None:
    async with served(model_free(DraftServicer())) as (one,):
        await one.say(NOT_SERVING)
        await fails(one.address, "health")


async def test_a_draft_that_counts_its_own_proposal_is_found(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_service.proposers.standalone.check_start", lambda *_: None)
    async with draft(model) as (address, _):
        await fails(address, "unchanged")


# ---- the command


async def command(*words: str) -> tuple[int, str, str]:
    ran = await asyncio.to_thread(partial(run_here, "doctor", "draft", *words))
    return ran.returncode, ran.stdout, ran.stderr


async def test_the_command_says_what_fails() -> None:
    async with serving(model_free(Misplaced())) as (address, _):
        code, out, _ = await command(address, "--json")
        report = json.loads(out)
        assert (code, report["conforms"]) == (1, False)
        wrong = {each["check"] for each in report["findings"] if each["severity"] != "ok"}
        assert {"reading", "proposals"} <= wrong
        assert not wrong & {"health", "model"}


async def test_the_command_passes_a_draft_and_names_one_that_is_not_there() -> None:
    async with serving(model_free(DraftServicer())) as (address, _):
        code, out, _ = await command(address)
    assert code == 0
    assert f"{len(CHECKS)} checks: {len(CHECKS)} fine" in out
    code, out, error = await command(address)
    assert (code, out) == (4, "")
    assert error.count("\n") == 1


def test_the_page_names_every_field() -> None:
    """Those of all messages of the service, and of the messages in them."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    calls = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].methods
    left = [message for call in calls for message in (call.input_type, call.output_type)]
    seen, missing = set(), []
    while left:
        message = left.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        missing += [f"{message.name}.{each.name}" for each in message.fields if each.name not in named]
        left += [each.message_type for each in message.fields if each.message_type is not None]
    assert {"tandem.v1.SamplingParams", "tandem.v1.StepTime"} <= seen
    assert missing == []
