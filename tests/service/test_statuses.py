"""No client hears of any status that a service ends with, wherever it does, while one honest target is ready."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.model.types import GenerationRequest
from tandem.serving.interceptors import Context
from tandem.v1 import draft_pb2, target_pb2, types_pb2
from tests.service.clients import complete
from tests.service.fakes import FakeDraft, FakeTarget, fleet

TOKENS = 20
EXPECTED = tuple(range(11, 11 + TOKENS))
REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2, seed=1)
REQUESTS = 3
SELDOM_PROBED = (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Those that a target may say and work: a full one stays ready, and one that went must answer a health check alone."""
PLACES = ("at open", "in a step", "as the stream's end", "as the stream's beginning")
FORGED = "gone\n2026-01-01T00:00:00.000+00:00 error   coordinator: \x1b[31mforged\x9b\u2028"
"""A peer's words that would begin a line of the log, and colour it."""


async def saying(
    code: grpc.StatusCode, place: str, requests: AsyncIterator[Any], answers: Any, context: Context
) -> AsyncIterator[tuple[Any, dict[int, types_pb2.Ending]]]:
    """A stream's answers, each with the endings to add by number, until it or its sequences end with a status."""
    opened: list[int] = []

    async def observed() -> AsyncIterator[Any]:
        async for request in requests:
            opened.extend(each.sequence for each in request.parts if each.HasField("open"))
            yield request

    def endings() -> dict[int, types_pb2.Ending]:
        ending = types_pb2.Ending(code=code.value[0], message=FORGED)
        found = dict.fromkeys(opened, ending)
        opened.clear()
        return found

    if place == "at open":
        async for _ in observed():
            yield None, endings()
        return
    count = 0
    if place != "as the stream's beginning":
        async for answer in answers(observed(), context):
            count += 1
            if count > 3 and place == "as the stream's end":
                break
            yield (answer, {}) if count <= 3 else (None, endings())
    if code is not grpc.StatusCode.OK:
        await context.abort(code, FORGED.replace("\n", "%0A"))


class LyingTarget(FakeTarget):
    """Says a status."""

    def __init__(self, code: grpc.StatusCode, place: str) -> None:
        super().__init__()
        self.code = code
        self.place = place
        self.step_seconds = 0.001

    async def Verify(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        async for answer, endings in saying(self.code, self.place, request_iterator, super().Verify, context):
            answer = answer or target_pb2.VerifyResponse()
            for number, ending in endings.items():
                answer.parts.add(sequence=number, ending=ending)
            yield answer


class LyingDraft(FakeDraft):
    """Says a status."""

    def __init__(self, code: grpc.StatusCode, place: str) -> None:
        super().__init__()
        self.code = code
        self.place = place

    async def Propose(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async for answer, endings in saying(
            self.code, self.place, request_iterator, super().Propose, context
        ):
            answer = answer or draft_pb2.ProposeResponse()
            for number, ending in endings.items():
                answer.parts.add(sequence=number, ending=ending)
            yield answer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", grpc.StatusCode)
async def test_no_client_hears_of_a_status_of_one_target_while_another_is_ready(
    code: grpc.StatusCode, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lying = LyingTarget(code, place)
    async with fleet(lying, FakeTarget()) as (client, _, coordinator):
        for _ in range(REQUESTS):
            assert (await complete(client, REQUEST)).token_ids == EXPECTED
        if code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            went_down = [record for record in caplog.records if record.message == "replica down"]
            assert any("target service: " in str(vars(record)["reason"]) for record in went_down)
        reasons = [str(vars(record).get("reason", "")) for record in caplog.records]
        reasons += [shot.reason for shot in coordinator.replicas.snapshots()]
        assert all(each.isprintable() for each in reasons), "operators read them in a terminal"
        if place in ("at open", "as the stream's beginning") and code not in SELDOM_PROBED:
            losses = [record for record in caplog.records if record.message.startswith("target lost")]
            assert len(losses) == 1, "its probe fails as well"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", grpc.StatusCode)
async def test_no_client_hears_of_a_status_of_the_draft(code: grpc.StatusCode, place: str) -> None:
    async with fleet(FakeTarget(), LyingDraft(code, place)) as (client, *_):
        for _ in range(REQUESTS):
            assert (await complete(client, REQUEST)).token_ids == EXPECTED
