"""`tandem doctor target`: our targets pass every check, and faults are found by the check that is for them."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from tandem.engine.models.loading import LoadedModel
from tandem.model.admin import Severity
from tandem.model.types import Delta, DenseRow, GoesOn, Proposal, SupportRow, TokenRow, Verification
from tandem.serving.interceptors import Context
from tandem.v1.target_pb2 import (
    GetTokenizerRequest,
    GetTokenizerResponse,
    TargetServiceGetModelInfoRequest,
    TargetServiceGetModelInfoResponse,
    VerifyRequest,
    VerifyResponse,
)
from tandem_coordinator.transport.conformance.target import SUITE
from tandem_draft.proposers.ngram import ngram_proposer
from tests.commands import run_here
from tests.service.engines import Faults, FaultyTarget, model_free, target
from tests.service.fakes import serving
from tests.service.test_own_heads import host, saved


async def problems(address: str, seconds: float = 30.0) -> list[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        findings = await SUITE.check(channel, seconds)
    assert [each.check for each in findings] == list(SUITE.checks)
    return [f"{each.check}: {each.detail}" for each in findings if each.severity is not Severity.OK]


async def test_a_target_conforms(model: LoadedModel) -> None:
    async with target(model, Faults()) as (address, _):
        assert await problems(address) == []


async def test_a_target_with_a_head_conforms(tmp_path: Path) -> None:
    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        found = await problems(hosted.address)
    assert [each for each in found if not each.startswith("tokenizer:")] == []


def other_tokens(answer: Verification) -> Verification:
    rows = tuple(TokenRow(row.token_id ^ 1) if isinstance(row, TokenRow) else row for row in answer.rows)
    return replace(answer, rows=rows)


def misplaced(answer: Verification) -> Verification:
    return replace(answer, base_length=answer.base_length + 1)


def other_masses(answer: Verification) -> Verification:
    rows = tuple(
        replace(row, probs=row.probs * 0.5, outside_mass=1.0 - 0.5 * float(row.probs.sum()))
        if isinstance(row, SupportRow)
        else row
        for row in answer.rows
    )
    return replace(answer, rows=rows)


class Forgetful:
    """Draws otherwise each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, answer: Verification) -> Verification:
        self.count += 1
        rows = tuple(
            TokenRow((row.token_id + self.count) % 90) if isinstance(row, TokenRow) else row
            for row in answer.rows
        )
        return replace(answer, rows=rows)


def elsewhere(answer: Verification) -> Verification:
    if answer.goes_on is None:
        return answer
    delta, own_tokens = answer.goes_on
    return replace(answer, goes_on=GoesOn(Delta(delta.base_length, (delta.token_ids[0] ^ 1,)), own_tokens))


def drifting(answer: Verification) -> Verification:
    """Each answer's logits are a little higher than the last one's."""
    drifting_by = next(STEPS)
    rows = tuple(
        DenseRow(row.logits + np.linspace(0.0, drifting_by, len(row.logits), dtype=np.float32))
        if isinstance(row, DenseRow)
        else row
        for row in answer.rows
    )
    return replace(answer, rows=rows)


STEPS = itertools.count(1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (other_tokens, "rows: token row 0 names"),
        (misplaced, "rows: its rows begin at"),
        (other_masses, "supports: support row 0: a probability is"),
        (drifting, "rollback: a rejected proposal left a trace"),
        (Forgetful(), "seeds: two sequences with one seed"),
        (elsewhere, "lead: it goes on with token"),
    ],
)
async def test_a_fault_is_found(
    fault: Callable[[Verification], Verification], sentence: str, model: LoadedModel
) -> None:
    async with target(model, Faults(garbled=dict.fromkeys(range(1, 100), fault))) as (address, _):
        found = await problems(address, 2.0)
    assert any(each.startswith(sentence) for each in found), found


# ---- faults that one check alone finds


class Wrong(FaultyTarget):
    """A target that is right but for what is done to its messages: requests as they come, answers as they leave."""

    def on_request(self, message: VerifyRequest) -> None:
        """Change a message that has come."""

    def on_response(self, message: VerifyResponse) -> None:
        """Change a message that is to leave."""

    async def Verify(
        self, request_iterator: AsyncIterator[VerifyRequest], context: Context
    ) -> AsyncIterator[VerifyResponse]:
        self.begin_stream()

        async def requests() -> AsyncIterator[VerifyRequest]:
            async for message in request_iterator:
                self.on_request(message)
                yield message

        async for message in super().Verify(requests(), context):
            self.on_response(message)
            yield message

    def begin_stream(self) -> None:
        self.asked: Counter[tuple[int, int]] = Counter()
        """How often each step was asked for, by its sequence and serial."""

    def count(self, message: VerifyRequest) -> None:
        self.asked.update(
            (part.sequence, part.step.serial)
            for part in message.parts
            if part.HasField("step") and part.step.serial
        )

    def is_repeated(self, part: VerifyResponse.Part) -> bool:
        return self.asked[part.sequence, part.verification.serial] > 1


def keep(message: Any, wanted: Callable[[Any], bool]) -> None:
    kept = [part for part in message.parts if wanted(part)]
    del message.parts[:]
    message.parts.extend(kept)


class DrawsAgain(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        self.count(message)

    def on_response(self, message: VerifyResponse) -> None:
        for part in filter(self.is_repeated, message.parts):
            part.verification.token_rows.token_ids[0] ^= 1


class ForgetsLed(DrawsAgain):
    """Repeats the answer to the step, and not those that followed it."""

    def on_response(self, message: VerifyResponse) -> None:
        keep(message, lambda part: not (part.verification.led and self.is_repeated(part)))


class IgnoresRepeated(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        self.count(message)
        keep(message, lambda part: self.asked[part.sequence, part.step.serial] < 2)


class RepeatsTwice(DrawsAgain):
    def on_response(self, message: VerifyResponse) -> None:
        message.parts.extend([part for part in message.parts if self.is_repeated(part)])


class RefusesUnknown(Wrong):
    """Says of a sequence that it does not know what it says of a mistake."""

    def on_response(self, message: VerifyResponse) -> None:
        for part in message.parts:
            if part.ending.code == grpc.StatusCode.UNAVAILABLE.value[0]:
                part.ending.code = grpc.StatusCode.INVALID_ARGUMENT.value[0]


class NeverEnds(Wrong):
    def on_response(self, message: VerifyResponse) -> None:
        keep(message, lambda part: not part.HasField("ending") or part.ending.code)


class EndsBadly(Wrong):
    def on_response(self, message: VerifyResponse) -> None:
        for part in message.parts:
            if part.HasField("ending") and not part.ending.code:
                part.ending.code = grpc.StatusCode.ABORTED.value[0]


class AnswersCancel(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("cancel"):
                part.finish.SetInParent()


class EndsTwice(Wrong):
    def on_response(self, message: VerifyResponse) -> None:
        ended = [part for part in message.parts if part.HasField("ending") and not part.ending.code]
        message.parts.extend(ended)


class Vague(Wrong):
    def on_response(self, message: VerifyResponse) -> None:
        for part in message.parts:
            if part.ending.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
                part.ending.code = grpc.StatusCode.INTERNAL.value[0]


class TakesNothingForCommitted(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("step") and not part.step.HasField("committed"):
                part.step.committed.token_ids.append(1)


class TakesAnyCredits(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("step") and part.step.HasField("lead"):
                part.step.lead.credits = max(0, min(part.step.lead.credits, 8))


class TakesAnyHead(Wrong):
    """Has no head, and takes a step that asks for its proposal."""

    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("step") and part.step.HasField("own_head"):
                part.step.given.SetInParent()


class PassesOverUnnumbered(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        keep(message, lambda part: part.sequence > 0)


class LeadsUnasked(Wrong):
    """Goes on by itself where no step is counted and no lead is set."""

    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("step") and not part.step.serial and not part.step.HasField("lead"):
                part.step.lead.credits = 2


class LeadsOn(Wrong):
    """Goes on by itself behind a step that ends a lead."""

    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            step = part.step
            if step.serial == 2 and step.committed.base_length < 24 and not step.HasField("lead"):
                step.lead.credits = 1


class LeadsFurther(Wrong):
    """Takes one step more than its credits allow."""

    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            # Those of a repetition are given too few instead: nothing is taken twice there
            if part.HasField("step") and part.step.HasField("lead"):
                part.step.lead.credits += 1


class NamesOtherHash(Wrong):
    async def GetModelInfo(
        self, request: TargetServiceGetModelInfoRequest, context: Context
    ) -> TargetServiceGetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        answer.model_info.tokenizer_hash = "0" * 64
        return answer


class SendsNoTokenizer(Wrong):
    async def GetTokenizer(
        self, request: GetTokenizerRequest, context: Context
    ) -> AsyncIterator[GetTokenizerResponse]:
        async for part in super().GetTokenizer(request, context):
            part.file_name = "tokenizer_config.json"
            yield part


class TearsTokenizer(Wrong):
    """Sends the file without its end."""

    async def GetTokenizer(
        self, request: GetTokenizerRequest, context: Context
    ) -> AsyncIterator[GetTokenizerResponse]:
        async for part in super().GetTokenizer(request, context):
            part.content = part.content[:-2]
            yield part


FAULTS: list[tuple[type[Wrong], str]] = [
    (NamesOtherHash, "tokenizer: GetModelInfo names the tokenizer_hash 000000000000; it must be"),
    (SendsNoTokenizer, "tokenizer: GetTokenizer sent no tokenizer.json"),
    (TearsTokenizer, "tokenizer: its tokenizer.json cannot be read"),
    (DrawsAgain, "repeated: a step that was asked again: it answered ["),
    (ForgetsLed, "repeated: a step that was asked again: no answer"),
    (IgnoresRepeated, "repeated: a step that was asked again: no answer"),
    (RepeatsTwice, "repeated: a step that was asked again: "),
    (RefusesUnknown, "repeated: a step with a serial for a sequence that it does not know ended with INVALID_ARGUMENT"),
    (NeverEnds, "finish: no answer"),
    (EndsBadly, "finish: a Finish ended with ABORTED"),
    (AnswersCancel, "finish: it answered a Cancel"),
    (EndsTwice, "finish: it answered a sequence that had ended"),
    (Vague, "refusals: a step without an Open ended with INTERNAL"),
    (TakesNothingForCommitted, "refusals: a step without its committed tokens: it answered"),
    (TakesAnyCredits, "refusals: a lead of 9 credits: it answered"),
    (TakesAnyHead, "refusals: own_head without a head: it answered"),
    (PassesOverUnnumbered, "refusals: it did not end the stream"),
    (LeadsUnasked, "unasked: lead is not set"),
    (LeadsOn, "unasked: a step without credits ends a lead"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "sentence"), FAULTS)
async def test_a_fault_is_found_by_the_check_that_is_for_it(
    fault: type[Wrong], sentence: str, model: LoadedModel
) -> None:
    async with target(model, Faults(), servicer=fault) as (address, _):
        (found,) = await problems(address, 2.0)
    assert found.startswith(sentence)


def test_each_check_has_a_fault() -> None:
    found = {sentence.split(":")[0] for _, sentence in FAULTS}
    assert found == {"tokenizer", "repeated", "finish", "refusals", "unasked"}


async def test_credits_that_are_exceeded_are_found(model: LoadedModel) -> None:
    async with target(model, Faults(), servicer=LeadsFurther) as (address, _):
        found = await problems(address, 2.0)
    assert any(each.startswith("lead: it had 2 credits and took 2 steps") for each in found), found


async def test_a_round_that_is_answered_twice_is_found(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, and again when it is asked for."""
    monkeypatch.setattr("tandem_target.verifier.VerifiedSequence.confirms", lambda *_: False)
    async with target(model, Faults()) as (address, _):
        (found,) = await problems(address, 2.0)
    assert found.startswith("lead: it answered a round twice")


class NeverLeads(Wrong):
    def on_request(self, message: VerifyRequest) -> None:
        for part in message.parts:
            if part.HasField("step") and 0 <= part.step.lead.credits <= 8:
                part.step.ClearField("lead")


async def test_a_target_that_never_leads_conforms(model: LoadedModel) -> None:
    async with target(model, Faults(), servicer=NeverLeads) as (address, _):
        assert await problems(address) == []


async def test_a_head_of_a_target_that_never_leads_conforms(tmp_path: Path) -> None:
    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        servicer = NeverLeads(Faults())
        servicer.verifier = hosted.verifier
        async with serving(servicer) as (address, _):
            found = await problems(address)
    assert [each for each in found if not each.startswith("tokenizer:")] == []


async def test_a_round_of_a_head_that_is_answered_twice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_target.verifier.VerifiedSequence.confirms", lambda *_: False)
    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        found = await problems(hosted.address)
    assert any(each.startswith("own lead: greedy: it answered a round twice") for each in found), found


# ---- faults of heads


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda own: replace(own, token_ids=(*own.token_ids, 1, 1)), "own head: own_head.max_tokens is 3"),
        (lambda own: replace(own, base_length=own.base_length + 1), "own head: its head's proposal extends"),
        (None, "own head: a step with own_head came back without the proposal"),
    ],
)
async def test_a_fault_of_a_head_is_found(
    fault: Callable[[Proposal], Proposal] | None, sentence: str, tmp_path: Path
) -> None:
    def changed(answer: Verification) -> Verification:
        if answer.proposal is None:
            return answer
        return replace(answer, proposal=None if fault is None else fault(answer.proposal))

    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        servicer = FaultyTarget(Faults(garbled=dict.fromkeys(range(1, 1000), changed)))
        servicer.verifier = hosted.verifier
        async with serving(servicer) as (address, _):
            found = await problems(address, 2.0)
    assert any(each.startswith(sentence) for each in found), found


# ---- the command


async def command(*words: str) -> tuple[int, str, str]:
    ran = await asyncio.to_thread(partial(run_here, "doctor", *words))
    return ran.returncode, ran.stdout, ran.stderr


async def test_the_command_passes_a_target_and_names_one_that_is_not_there(model: LoadedModel) -> None:
    async with target(model, Faults()) as (address, _):
        code, out, _ = await command("target", address)
    assert code == 0
    assert f"{len(SUITE.checks)} checks: {len(SUITE.checks)} fine, 0 warnings, 0 problems" in out
    code, out, error = await command("target", address)
    assert (code, out, error.count("\n")) == (4, "", 1)


async def test_the_command_says_what_fails_in_json_too(model: LoadedModel) -> None:
    async with target(model, Faults(), servicer=EndsBadly) as (address, _):
        code, out, _ = await command("target", address, "--json")
    report = json.loads(out)
    assert (code, report["conforms"]) == (1, False)
    assert [each["check"] for each in report["findings"]] == list(SUITE.checks)
    assert {each["check"] for each in report["findings"] if each["severity"] != "ok"} == {"finish"}


@pytest.mark.parametrize("output", [(), ("--json",)])
async def test_the_address_of_a_service_of_the_other_kind_is_said_to_be_one(
    output: tuple[str, ...], model: LoadedModel
) -> None:
    async with target(model, Faults()) as (address, _), serving(model_free(ngram_proposer)) as (draft, _):
        of_draft = await command("target", draft, *output)
        of_target = await command("draft", address, *output)
        as_target = await command("draft", draft, "--target", draft, *output)
    for (code, out, error), where, kind, wanted in (
        (of_draft, draft, "draft", "target"),
        (of_target, address, "target", "draft"),
        (as_target, draft, "draft", "target"),
    ):
        assert (code, out, error.count("\n")) == (2, "", 1), error
        assert f"{where} is a {kind} service (" in error
        assert f"give the address of a {wanted} service, or check this one with tandem doctor {kind}" in error


@pytest.mark.parametrize("kind", ["draft", "target"])
async def test_no_address_is_bad_usage(kind: str) -> None:
    code, out, error = await command(kind)
    assert (code, out) == (2, "")
    assert "ADDRESS" in error
