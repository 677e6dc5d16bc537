"""A stuck service reports NOT_SERVING and refuses new calls until it continues."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.unit.tandem.serving.served import Scripted, health_of, refusal, running, texts_from


class Stalling(Scripted):
    overdue_seconds = 0.0


async def wait_for_health(address: str, health: str) -> None:
    async with asyncio.timeout(30.0):
        while await health_of(address) != health:  # noqa: ASYNC110 - asked over the network
            await asyncio.sleep(0.05)


async def test_a_stuck_service_is_not_serving_until_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        await wait_for_health(address, "SERVING")
        service.overdue_seconds = 42.0
        await wait_for_health(address, "NOT_SERVING")
        error = await refusal(address)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "stuck in a step for 42 s" in (error.details() or "")
        service.overdue_seconds = 0.0
        await wait_for_health(address, "SERVING")
        assert await texts_from(address) == ["hello"]


async def test_a_stuck_service_still_drains(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        service.overdue_seconds = 42.0
        await wait_for_health(address, "NOT_SERVING")
    # `running` has drained the server, and asserted that it ended.
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_of(address)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
