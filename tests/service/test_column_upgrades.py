"""Columns change no token, and a rolling upgrade of either side needs none: the other then answers row by row."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest

from coordinator.rejection import MessageRounds, Round
from coordinator.rejection.rounds import Decide, MessageVerification
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.servicer import DraftServicer
from tandem.engine.models.loading import LoadedModel
from tandem.serving.interceptors import Context
from tandem.types import (
    Delta,
    DraftOptions,
    GenerationRequest,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetOptions,
    VerifyStep,
)
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tests.service.clients import Completed, complete_all
from tests.service.engines import Faults, draft, target, tiny_model
from tests.service.fakes import coordinating
from tests.service.target_faults import without_columns

SECONDS = 60.0
_SAMPLED = GenerationRequest(
    "def f(", max_tokens=12, temperature=1.0, top_k=20, num_speculative_tokens=3, ignore_eos=True
)
_RULES = {
    "greedy": (RowKind.TOKEN, RowKind.SUPPORT, RowKind.DENSE),
    "strict": (RowKind.TOKEN, RowKind.DENSE),
    "residual": (RowKind.SUPPORT, RowKind.DENSE),
    "block": (RowKind.SUPPORT, RowKind.DENSE),
    "typical-acceptance": (RowKind.SUPPORT, RowKind.DENSE),
    "logit-comparison": (RowKind.SUPPORT, RowKind.DENSE),
}
REQUESTS = [
    replace(
        _SAMPLED,
        temperature=0.0 if rule == "greedy" else 1.0,
        seed=1,
        rejection_sampling_strategy=None if rule == "greedy" else rule,
        row_kind=row_kind,
    )
    for rule, row_kinds in _RULES.items()
    for row_kind in row_kinds
]


@dataclass
class Forms:
    """What a service's sequences were answered with."""

    columns: int = 0
    rows: int = 0


class CountingDraft(DraftServicer):
    """A draft that may be too old for columns."""

    def __init__(self, forms: Forms, *, is_old: bool) -> None:
        super().__init__()
        self._forms = forms
        self._is_old = is_old

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async def known() -> AsyncIterator[draft_pb2.ProposeRequest]:
            async for request in request_iterator:
                if self._is_old and request.HasField("open"):
                    request.open.ClearField("takes_columns")
                yield request

        async for response in super().Propose(known(), context):
            self._forms.columns += response.HasField("columns")
            self._forms.rows += bool(response.distributions)
            yield response


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


async def completed(
    model: LoadedModel, at_once: int, *, old_target: bool = False, old_draft: bool = False
) -> tuple[list[Completed], Forms, Forms]:
    """The completions, and the forms of the target's and the draft's answers."""
    verified, proposed = Forms(), Forms()

    def count(response: target_pb2.VerifyResponse) -> None:
        verified.columns += response.HasField("columns")
        verified.rows += response.HasField("token_rows") or response.HasField("support_rows")

    faults = Faults(garbled=dict.fromkeys(range(1, 10_000), count))
    if old_target:
        faults.on_request = without_columns
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(target(model, faults, max_sequences=32))
        servicer = CountingDraft(proposed, is_old=old_draft)
        draft_address, _ = await stack.enter_async_context(draft(model, servicer, max_sequences=32))
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=30.0,
            speculation_policy="fixed",
            draft_ahead="off",
        )
        address = await stack.enter_async_context(coordinating(settings))
        return await complete_all(address, REQUESTS, at_once), verified, proposed


def counting(read: Callable[[Any], Iterator[Any]], shared: list[str]) -> Callable[[Any], Iterator[Any]]:
    """Note the messages in which several sequences share columns."""

    def noting(message: Any) -> Iterator[Any]:
        if message.columns:
            shared.append(type(message).__name__)
        return read(message)

    return noting


@pytest.mark.parametrize("at_once", [1, len(REQUESTS)], ids=["alone", "sharing a stream"])
async def test_an_upgrade_of_either_side_keeps_every_token_of_every_rule_and_row(
    at_once: int, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[str] = []
    decided: list[Round] = []
    # Whether three answers meet in one message is a matter of time; here one is enough.
    monkeypatch.setattr("tandem.wire.columns._MIN_JOINED", 1)
    add = MessageRounds.add

    def adding(self: MessageRounds, decide: Decide, own: Round) -> MessageVerification:
        decided.append(own)
        return add(self, decide, own)

    monkeypatch.setattr(MessageRounds, "add", adding)
    for wire in (target_wire, draft_wire):
        monkeypatch.setattr(wire, "columns_from_proto", counting(wire.columns_from_proto, shared))
    before, verified, proposed = await completed(model, at_once, old_target=True, old_draft=True)
    assert (verified.columns, proposed.columns) == (0, 0)
    assert verified.rows > 0
    assert proposed.rows > 0
    for old_target, old_draft in ((False, True), (True, False), (False, False)):
        after, verified, proposed = await completed(
            model, at_once, old_target=old_target, old_draft=old_draft
        )
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
        assert [each.drafted for each in after] == [each.drafted for each in before]
        assert (verified.columns > 0, verified.rows > 0) == (not old_target, old_target)
        assert (proposed.columns > 0, proposed.rows > 0) == (not old_draft, old_draft)
    both = {"VerifyManyResponse", "ProposeManyResponse"}
    assert set(shared) == (both if at_once > 1 else set()), "sequences share columns on a shared stream"
    assert bool(decided) == (at_once > 1), "rounds of a message are decided together"


SAMPLING = SamplingParams(temperature=1.0, seed=3)


async def test_an_older_coordinator_gets_no_columns_on_either_kind_of_stream(model: LoadedModel) -> None:
    """It does not say that it takes them. Three sequences at once would share a block."""
    steps = ProposeStep(Delta(0, (5, 6, 7)), 2), VerifyStep(Delta(0, (5, 6, 7)), RowKind.TOKEN, 1)
    draft_options = DraftOptions("old", SAMPLING, row_kind=RowKind.SUPPORT)
    draft_messages = [draft_wire.options_to_proto(draft_options), draft_wire.step_to_proto(steps[0])]
    target_messages = [
        target_wire.options_to_proto(TargetOptions("old", SAMPLING)),
        target_wire.step_to_proto(steps[1]),
    ]
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        for address, service, messages, many_request, many_response, response in (
            (
                (await stack.enter_async_context(draft(model)))[0],
                "DraftService/Propose",
                draft_messages,
                draft_pb2.ProposeManyRequest,
                draft_pb2.ProposeManyResponse,
                draft_pb2.ProposeResponse,
            ),
            (
                (await stack.enter_async_context(target(model, Faults())))[0],
                "TargetService/Verify",
                target_messages,
                target_pb2.VerifyManyRequest,
                target_pb2.VerifyManyResponse,
                target_pb2.VerifyResponse,
            ),
        ):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            contents = [message.SerializeToString() for message in messages]
            alone: Any = channel.stream_stream(f"/tandem.v1.{service}")()
            for content in contents:
                await alone.write(content)
            answer = response.FromString(await alone.read())
            assert not answer.HasField("columns")
            alone.cancel()
            one_for_all: Any = channel.stream_stream(f"/tandem.v1.{service}Many")()
            request = many_request()
            for number in (1, 2, 3):
                for content in contents:
                    request.parts.add(sequence=number, message=content)
            await one_for_all.write(request.SerializeToString())
            answered = 0
            while answered < 3:
                many = many_response.FromString(await one_for_all.read())
                assert not many.columns
                for part in many.parts:
                    assert not response.FromString(part.message).HasField("columns")
                answered += len(many.parts)
            one_for_all.cancel()
