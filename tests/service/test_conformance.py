"""`tandem doctor draft`: our drafts pass every check, and for each check there is a fault that it finds."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from tandem.engine.models.loading import LoadedModel
from tandem.errors import InvalidRequestError, ProtocolError, ServiceUnavailableError
from tandem.model.admin import Severity
from tandem.model.types import DraftedOutcomes, Proposal, ProposeStep, SparseDistribution
from tandem.serving.interceptors import Context
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2 import (
    DraftServiceGetModelInfoRequest,
    DraftServiceGetModelInfoResponse,
    ProposeRequest,
    ProposeResponse,
)
from tandem_coordinator.transport.conformance.draft import SUITE, Conversation, Subject
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_draft.proposers.ngram import ngram_proposer
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_draft.servicer import DraftedFor, DraftServicer
from tests.commands import run_here
from tests.paths import ROOT
from tests.service.engines import NewProposer, draft, model_free
from tests.service.fakes import NOT_SERVING, FakeTarget, hooked, served, serving

Answer = Proposal | DraftedOutcomes
SECONDS = 30.0
"""An answer may take so long, where one comes."""


async def problems(address: str) -> list[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        findings = await SUITE.check(channel, SECONDS)
    assert [each.check for each in findings] == list(SUITE.checks)
    return [f"{each.check}: {each.detail}" for each in findings if each.severity is not Severity.OK]


async def test_a_draft_model_conforms(model: LoadedModel) -> None:
    async with draft(model) as (address, _):
        assert await problems(address) == []


@pytest.mark.parametrize("new", [ngram_proposer, suffix_proposer])
async def test_a_draft_without_a_model_conforms(new: NewProposer) -> None:
    async with serving(model_free(new)) as (address, _):
        assert await problems(address) == []


# ---- faults


Hook = Callable[["Faulty", Any], Any]


class Faulty(DraftServicer):
    """A draft that is right but for what these functions do: `proposal` and `outcomes` return what is said in place of
    an answer, `request` and `response` change a message that has come or is to leave."""

    def __init__(self, **hooks: Hook) -> None:
        super().__init__()
        self.hooks = hooks
        self.opened: set[int] = set()
        self.turn = False

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.last: ProposeStep | None = None
        self.rolled_back = False

        def on_step(step: ProposeStep) -> None:
            last = self.last
            self.last = step
            self.rolled_back = last is not None and 0 < step.delta.base_length < last.delta.length

        def on_answer(answer: Answer) -> Answer:
            said: Answer = self._hooked("proposal" if isinstance(answer, Proposal) else "outcomes", answer)
            return said

        await super().serve_sequence(hooked(sequence, on_step, on_answer))

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        async def requests() -> AsyncIterator[ProposeRequest]:
            async for message in request_iterator:
                self._hooked("request", message)
                yield message

        async for response in super().Propose(requests(), context):
            self._hooked("response", response)
            yield response

    def _hooked(self, kind: str, of: Any) -> Any:
        hook = self.hooks.get(kind)
        return of if hook is None else hook(self, of)


def shifted(proposal: Proposal) -> Proposal:
    return replace(
        proposal, token_ids=tuple(token_id ^ 1 for token_id in proposal.token_ids), distributions=()
    )


def chatty(_: Faulty, proposal: Proposal) -> Proposal:
    sure = tuple(SparseDistribution(np.array([each]), np.ones(1)) for each in proposal.token_ids)
    return replace(proposal, distributions=sure)


def unseeded(draft: Faulty, proposal: Proposal) -> Proposal:
    draft.turn = not draft.turn
    return shifted(proposal) if draft.turn else proposal


def vague(_: Faulty, message: ProposeResponse) -> None:
    for part in message.parts:
        if part.HasField("ending") and part.ending.code:
            part.ending.code = grpc.StatusCode.INTERNAL.value[0]


def tolerant(draft: Faulty, message: ProposeRequest) -> None:
    kept = [each for each in message.parts if not each.HasField("open") or each.sequence not in draft.opened]
    draft.opened |= {each.sequence for each in kept if each.HasField("open")}
    del message.parts[:]
    message.parts.extend(kept)


def fragile(_: Faulty, message: ProposeRequest) -> None:
    if any(part.HasField("cancel") for part in message.parts):
        raise InvalidRequestError("cancelled")


def generous(_: Faulty, outcomes: DraftedOutcomes) -> DraftedOutcomes:
    if outcomes.depth:
        return outcomes
    more = range(100)
    return replace(
        outcomes,
        token_ids=outcomes.token_ids + (1,) * len(more),
        accepted_counts=outcomes.accepted_counts + (0,) * len(more),
        next_token_ids=outcomes.next_token_ids + tuple(more),
    )


def boundless(_: Faulty, message: ProposeRequest) -> None:
    for part in message.parts:
        if part.HasField("open"):
            part.open.ClearField("ahead")


def guessing(_: Faulty, message: ProposeRequest) -> None:
    for part in message.parts:
        if part.HasField("step") and part.step.WhichOneof("question") is None:
            part.step.propose.max_tokens = 1


def twice(_: Faulty, message: ProposeResponse) -> None:
    message.parts.extend([part for part in message.parts if part.HasField("proposal")])


def silent(_: Faulty, message: ProposeResponse) -> None:
    kept = [part for part in message.parts if not part.HasField("ending")]
    del message.parts[:]
    message.parts.extend(kept)


def repetitive(_: Faulty, message: ProposeResponse) -> None:
    message.parts.add(sequence=1).ending.SetInParent()


def strict(_: Faulty, message: ProposeRequest) -> None:
    if len(UnknownFieldSet(message)):
        raise InvalidRequestError("unknown field")


class Nameless(Faulty):
    async def GetModelInfo(
        self, request: DraftServiceGetModelInfoRequest, context: Context
    ) -> DraftServiceGetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        answer.model_info.tokenizer_hash = ""
        return answer


class Endless(Faulty):
    """Proposes as much as it is asked for."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        async for step in sequence.steps():
            await sequence.answer(Proposal(step.delta.length, (1,) * min(step.token_count, 5000)))


class Careless(Faulty):
    """Ends a stream that it cannot read as if nothing were wrong."""

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        with suppress(InvalidRequestError):
            async for response in super().Propose(request_iterator, context):
                yield response


class Clinging(Faulty):
    """Keeps a stream that has ended."""

    async def Propose(
        self, request_iterator: AsyncIterator[ProposeRequest], context: Context
    ) -> AsyncIterator[ProposeResponse]:
        async for response in super().Propose(request_iterator, context):
            yield response
        await asyncio.Event().wait()


def with_extra_token(_: Faulty, proposal: Proposal) -> Proposal:
    return replace(proposal, token_ids=(*proposal.token_ids, 1))


def misplaced(_: Faulty, answer: Any) -> Any:
    return replace(answer, base_length=answer.base_length + 1)


def but(**hooks: Hook) -> Callable[[], Faulty]:
    return partial(Faulty, **hooks)


FAULTS: list[tuple[str, str, Callable[[], Faulty]]] = [
    ("model", "names no tokenizer", Nameless),
    ("reading", "proposes a token where none is asked for", but(proposal=with_extra_token)),
    ("proposals", "answers with the length after the proposal", but(proposal=misplaced)),
    ("token rows", "sends distributions unasked", but(proposal=chatty)),
    ("distributions", "draws otherwise each time", but(proposal=unseeded)),
    ("token logits", "sends none", but(proposal=lambda _, each: replace(each, token_logits=None))),
    ("order", "answers each step twice", but(response=twice)),
    ("idempotence", "takes a repeated delta for more tokens",
        but(proposal=lambda draft, each: shifted(each) if draft.last and draft.last.delta.base_length else each)),
    ("rollback", "keeps what was rolled back",
        but(proposal=lambda draft, each: shifted(each) if draft.rolled_back else each)),
    ("malformed", "ends sequences with a status of its own", but(response=vague)),
    ("huge", "proposes as much as it is asked for", Endless),
    ("opening", "passes over an Open of a sequence that is open", but(request=tolerant)),
    ("missing", "takes a step that asks for nothing", but(request=guessing)),
    ("unnumbered", "ends a stream that it cannot read as if nothing were wrong", Careless),
    ("unknown", "refuses what it does not know", but(request=strict)),
    ("finish", "does not say that a sequence has ended", but(response=silent)),
    ("stale", "says again, with each message, that the first sequence has ended",
        but(response=repetitive)),
    ("cancel", "breaks the stream with a cancelled sequence", but(request=fragile)),
    ("half closed", "keeps a stream that has ended", Clinging),
    ("ahead", "pushes more than it was granted", but(outcomes=generous)),
    ("budgets", "takes any budget", but(request=boundless)),
]  # fmt: skip


def test_each_check_has_a_fault() -> None:
    assert {name for name, *_ in FAULTS} | {"health", "unchanged"} == set(SUITE.checks)


async def fails(address: str, name: str) -> str:
    """Let the check find a fault, though not because nothing works; return its sentence."""
    async with grpc.aio.insecure_channel(address) as channel:
        info = await DraftClient(channel).model_info()
        with pytest.raises((ProtocolError, InvalidRequestError)) as caught:
            await SUITE.play(name, Subject(channel, info, 2.0))
        if name != "proposals":
            await SUITE.play("reading" if name != "reading" else "health", Subject(channel, info, SECONDS))
    sentence = str(caught.value)
    assert "UNAVAILABLE" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("name", "fault"), [pytest.param(name, fault, id=words) for name, words, fault in FAULTS]
)
async def test_a_fault_is_found(name: str, fault: Callable[[], Faulty], model: LoadedModel) -> None:
    async with draft(model, fault()) as (address, _):
        assert await fails(address, name)


async def test_a_draft_that_does_not_serve_is_found() -> None:
    async with served(model_free(ngram_proposer)) as (one,):
        await one.say(NOT_SERVING)
        assert "it must be 1 (SERVING)" in await fails(one.address, "health")


async def test_an_answer_that_is_no_protobuf_is_found() -> None:
    async with (
        serving(model_free(ngram_proposer)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        draft = Subject(channel, await DraftClient(channel).model_info(), SECONDS)
        async with Conversation(draft) as talk:
            garbled: Any = channel.stream_stream(
                "/tandem.v1.DraftService/Propose", response_deserializer=lambda _: b"\xff"
            )
            talk.call = garbled()
            with pytest.raises(ProtocolError, match="its answer cannot be read"):
                await talk.ask(draft.prompt())


async def test_a_draft_that_counts_its_own_proposal_is_found(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_draft.proposers.sequence.check_start", lambda *_: None)
    async with draft(model) as (address, _):
        assert await fails(address, "unchanged")


async def test_a_draft_that_answers_nothing_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}") as channel:
            with pytest.raises(ServiceUnavailableError, match="draft service: no answer within 1 s"):
                await SUITE.check(channel, 1.0)


# ---- the command


async def command(*words: str) -> tuple[int, str, str]:
    ran = await asyncio.to_thread(partial(run_here, "doctor", "draft", *words))
    return ran.returncode, ran.stdout, ran.stderr


async def test_the_command_says_what_fails() -> None:
    async with serving(model_free(ngram_proposer, Faulty(proposal=misplaced))) as (address, _):
        code, out, _ = await command(address, "--json")
        report = json.loads(out)
        assert (code, report["conforms"]) == (1, False)
        wrong = {each["check"] for each in report["findings"] if each["severity"] != "ok"}
        assert {"reading", "proposals"} <= wrong
        assert not wrong & {"health", "model"}


async def test_the_command_passes_a_draft_and_names_one_that_is_not_there() -> None:
    async with serving(model_free(ngram_proposer)) as (address, _):
        code, out, _ = await command(address)
    assert code == 0
    assert f"{len(SUITE.checks) + 1} checks: {len(SUITE.checks)} fine, 1 warning, 0 problems" in out
    assert "need its options or a target: drafting-method, vocabulary-size" in " ".join(out.split())
    code, out, error = await command(address)
    assert (code, out) == (4, "")
    assert error.count("\n") == 1


def test_the_page_names_every_field() -> None:
    """Those of all messages of the service, and of the messages in them."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    calls = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].methods
    left = [message for call in calls for message in (call.input_type, call.output_type)]
    seen = set()
    missing = []
    while left:
        message = left.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        missing += [f"{message.name}.{each.name}" for each in message.fields if each.name not in named]
        left += [each.message_type for each in message.fields if each.message_type is not None]
    assert {"tandem.v1.SamplingParams", "tandem.v1.StepTime"} <= seen
    assert missing == []


@pytest.mark.parametrize("factor", [1, 2])
async def test_the_coordinators_own_rules_are_checked_for_a_target(model: LoadedModel, factor: int) -> None:
    """A draft of another length keeps to the protocol, and a coordinator refuses it."""
    target = FakeTarget()
    target.model_info = replace(model.info, name="other", max_length=factor * model.info.max_length)
    async with draft(model) as (address, _), serving(target) as (target_address, _):
        code, out, _ = await command(address, "--target", target_address, "--json")
    found = {each["check"]: each for each in json.loads(out)["findings"]}
    assert found["tokenizer"]["severity"] == "ok"
    assert found["not checked"]["detail"].endswith("a target: drafting-method, configured-max-length")
    length = found["shared-max-length"]
    if factor == 1:
        assert (code, length["severity"]) == (0, "ok")
    else:
        assert (code, length["severity"]) == (1, "problem")
        assert (
            f"they must share one: start both with --max-length {model.info.max_length}" in length["detail"]
        )
