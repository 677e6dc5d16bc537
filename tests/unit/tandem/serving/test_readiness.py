"""A service that is stuck says so by its health and refuses what is new, until it goes on."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.unit.tandem.serving.served import Scripted, health_of, refusal, running, said_by


class Stalling(Scripted):
    overdue_seconds = 0.0


async def becomes(address: str, health: str) -> None:
    async with asyncio.timeout(30.0):
        while await health_of(address) != health:  # noqa: ASYNC110 - asked over the network
            await asyncio.sleep(0.05)


async def test_a_stuck_service_is_not_serving_until_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        await becomes(address, "SERVING")
        service.overdue_seconds = 42.0
        await becomes(address, "NOT_SERVING")
        error = await refusal(address)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "stuck in a step for 42 s" in (error.details() or "")
        service.overdue_seconds = 0.0
        await becomes(address, "SERVING")
        assert await said_by(address) == ["hello"]


async def test_a_stuck_service_still_drains(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        service.overdue_seconds = 42.0
        await becomes(address, "NOT_SERVING")
