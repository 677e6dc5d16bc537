"""Thousands of wrong messages to services in this process: each ends in one sentence or is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, settings

from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError
from tandem.model.types import (
    Delta,
    DraftedOutcomes,
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
from tandem.rpc.channels import open_channel
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tests.malformed import CALLS, contents, streams
from tests.service.engines import services, tiny_model
from tests.service.fakes import coordinator, settings_for

EXAMPLES, SOAK_EXAMPLES = 100, 2_000
AT_ONCE = 8
CALL_SECONDS = 20.0
"""Bound on a hang. A step of these models takes a few milliseconds."""
ENOUGH = 6
"""Answers after which a call is valid, and is cancelled: it may run for long."""
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
ENDINGS = {0, *(code.value[0] for code in REFUSALS), grpc.StatusCode.UNAVAILABLE.value[0]}
"""Codes with which a sequence may end. UNAVAILABLE: a step is asked again of a sequence that is not known."""
WORDS_OF_OURS = ("Traceback", "Error:", "site-packages", ".py", "0x")
"""Words that must not appear in errors for callers."""
RESPONSES: dict[str, Any] = {"draft": draft_pb2.ProposeResponse, "target": target_pb2.VerifyResponse}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def addresses(model: LoadedModel) -> AsyncIterator[dict[str, str]]:
    """A target, a draft and a coordinator over them."""
    async with services(model, model) as (target, draft):
        assert draft is not None
        async with coordinator(settings_for(target, draft)) as (address, _):
            yield {"target": target, "draft": draft, "coordinator": address}


def drawn(strategy: Any, count: int) -> list[Any]:
    """So many examples, the same ones in every run."""
    found: list[Any] = []

    @settings(
        phases=[Phase.generate],
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found


async def send(channel: Any, name: str, messages: Sequence[bytes]) -> int:
    """Make one call with these messages, and return the number of its answers; fail unless it ends properly."""
    path, good = CALLS[name]
    is_unary = len(good) == 1
    call: Any = (
        channel.unary_stream(path)(messages[0]) if is_unary else channel.stream_stream(path)(iter(messages))
    )
    count = 0
    try:
        async with asyncio.timeout(CALL_SECONDS):
            async for content in call:
                if name in RESPONSES:
                    check_endings(RESPONSES[name].FromString(content), messages)
                count += 1
                if count == ENOUGH:
                    break
    except grpc.aio.AioRpcError as error:
        if error.code() not in REFUSALS:
            pytest.fail(f"the call ends with {error.code()}, {error.details()!r}: {messages}")
        check_sentence(error.details() or "", messages)
    except TimeoutError:
        pytest.fail(f"the call hangs: {messages}")
    finally:
        call.cancel()
    return count


def check_endings(response: Any, messages: Sequence[bytes]) -> None:
    """Fail where a sequence ends in another way than by a refusal, or as planned."""
    for part in response.parts:
        if part.HasField("ending"):
            assert part.ending.code in ENDINGS, (part.ending, messages)
            if part.ending.code:
                check_sentence(part.ending.message, messages)


def check_sentence(sentence: str, messages: Sequence[bytes]) -> None:
    """Fail unless it is one sentence for a caller."""
    assert sentence, messages
    assert "\n" not in sentence, (sentence, messages)
    assert not any(word in sentence for word in WORDS_OF_OURS), (sentence, messages)


@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("name", CALLS)
async def test_wrong_messages_are_refused_or_served(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, name: str, examples: int
) -> None:
    """By the service itself: nothing is logged as an error, and a valid call is answered behind them."""
    _, good = CALLS[name]
    if len(good) == 1:
        calls = [[content] for content in drawn(contents(good[0]), examples)]
    else:
        calls = drawn(streams(good), examples)
    waiting = iter(calls)
    async with addresses(model) as found, open_channel(found[name]) as channel:

        async def send_some() -> None:
            for messages in waiting:
                await send(channel, name, messages)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(send_some())
        assert await send(channel, name, [message.SerializeToString() for message in good]) > 0
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
ANSWERS: dict[RowKind, Message] = {
    kind: target_wire.answers_to_proto(
        [(1, Verification(4, rows, COST, (5,), Delta(6, [7]), serial=2, led=1))]
    )
    for kind, rows in VERIFICATIONS.items()
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


@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_wrong_answers_raise_one_kind_of_error(examples: int) -> None:
    """That of a peer which breaks the protocol, for the message or in place of one sequence's answer."""
    refused = read = 0
    for kind, message in ANSWERS.items():
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
    assert refused > examples / 20
    assert read > examples / 20
