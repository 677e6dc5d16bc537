"""Thousands of wrong messages to services in this process: each ends in one sentence or is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message

from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError
from tandem.model.types import (
    Delta,
    DraftedOutcomes,
    GoesOn,
    Proposal,
    RowKind,
    RowStatistics,
    SparseDistribution,
    StepCost,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tests.malformed import CALLS, attempts, contents, drawn, main_call, send, valid
from tests.service.engines import services, tiny_model
from tests.service.fakes import coordinator, settings_for

EXAMPLES = 100
SOAK_EXAMPLES = 2_000
AT_ONCE = 8
DRAFT_PATIENCE_SECONDS = 5.0
"""Far below `CALL_SECONDS`: a draft that is late on a busy machine must not look like a call that hangs."""
MAX_SEQUENCES = 128
"""More than the calls that run at once may open, none of which must wait for another's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def addresses(model: LoadedModel) -> AsyncIterator[dict[str, str]]:
    """A target, a draft and a coordinator over them."""
    async with services(model, model, max_sequences=MAX_SEQUENCES) as (target, draft):
        assert draft is not None
        settings = settings_for(target, draft, draft_patience_seconds=DRAFT_PATIENCE_SECONDS)
        async with coordinator(settings) as (address, _):
            yield {"target": target, "draft": draft, "generation": address, "admin": address}


IN_FULL = pytest.param(SOAK_EXAMPLES, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("examples", [EXAMPLES, IN_FULL])
@pytest.mark.parametrize("name", CALLS)
async def test_wrong_messages_are_refused_or_served(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, name: str, examples: int
) -> None:
    """By the service itself: nothing is logged as an error, and a valid call is answered behind them."""
    waiting = iter(drawn(attempts(name), examples))
    main = main_call(name)
    async with addresses(model) as found:
        with grpc.insecure_channel(found[name]) as channel:

            async def send_some() -> None:
                for attempt in waiting:
                    await asyncio.to_thread(send, channel, attempt)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(send_some())
            assert await asyncio.to_thread(send, channel, valid(main)) > 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


COST = StepCost(0.01, 1, 3)
STATISTICS = RowStatistics(0.5, 0.5, 4, np.array([1, 2]), np.array([0.5, 0.25], np.float32))
SPARSE = SparseDistribution(np.array([4, 9]), np.array([0.5, 0.5]))
VERIFICATIONS: dict[RowKind, tuple[TargetRow, ...]] = {
    RowKind.TOKEN: (TokenRow(4), TokenRow(5)),
    RowKind.SUPPORT: (
        SupportRow(SPARSE.token_ids, SPARSE.probs, 0.25, 7, STATISTICS, 0.125),
        SupportRow(np.empty(0, np.int64), np.empty(0), 1.0, 7, None, 0.125),
    ),
}
OWN = Proposal(4, (5,), (SPARSE,), None, COST)
ANSWERS: dict[tuple[RowKind, int | None], Message] = {
    (kind, own): target_wire.answers_to_proto(
        [(1, Verification(4, rows, COST, OWN, GoesOn(Delta(6, [7]), own), serial=2, led=1))]
    )
    for kind, rows in VERIFICATIONS.items()
    for own in (None, 3)
}
PROPOSALS: tuple[Message, ...] = (
    draft_wire.answers_to_proto([(1, Proposal(4, (5, 6), (SPARSE, SPARSE), None, COST))]),
    draft_wire.answers_to_proto([(1, DraftedOutcomes(4, 0, (5, 6), (0, 1), (4, 9), (SPARSE, SPARSE)))]),
)


def parsed(message: Message, examples: int) -> Iterator[Any]:
    """Messages in this one's place that are well-formed."""
    for content in drawn(contents(message), examples):
        with suppress(DecodeError):  # gRPC ends the call
            yield type(message).FromString(content)


@pytest.mark.parametrize("examples", [EXAMPLES, IN_FULL])
def test_wrong_answers_raise_one_kind_of_error(examples: int) -> None:
    """A ProtocolError, for the whole message or in place of one sequence's answer."""
    refused = read = 0
    for (kind, _), message in ANSWERS.items():
        step = VerifyStep(Delta(3, [4, 5]), kind, 2, (SPARSE.token_ids,), with_statistics=True)
        for wrong in parsed(message, examples):
            try:
                for _, answer in target_wire.answers_from_proto(wrong):
                    if isinstance(answer, target_wire.Answer):
                        answer.verification(step)
                        read += 1
            except ProtocolError:
                refused += 1
    for message in PROPOSALS:
        for wrong in parsed(message, examples):
            try:
                list(draft_wire.answers_from_proto(wrong))
            except ProtocolError:
                refused += 1
    assert refused >= examples / 100
    assert read >= examples / 100
