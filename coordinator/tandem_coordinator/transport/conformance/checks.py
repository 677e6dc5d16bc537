"""Checks of a service's conformance: what they have in common, and how they are played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import ProtocolError, ServiceUnavailableError, TandemError
from tandem.model.admin import Finding
from tandem.model.types import ModelInfo
from tandem.rpc.channels import errors_of
from tandem_coordinator.transport.conformance.conversation import Conversation, Subject

_PREFIX = "check_"


def name_checks(*checks: Callable[..., Awaitable[str]]) -> dict[str, Any]:
    """Checks by the names that findings have: `_check_half_closed` is "half closed"."""
    return {check.__name__.lstrip("_").removeprefix(_PREFIX).replace("_", " "): check for check in checks}


async def check_health(subject: Subject, talk: Conversation[Any, Any]) -> str:
    """The check that both kinds of services have."""
    with errors_of(talk.service):
        answer = await health_pb2_grpc.HealthStub(subject.channel).Check(
            health_pb2.HealthCheckRequest(), timeout=subject.seconds
        )
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ProtocolError(f"grpc.health.v1.Health/Check says {answer.status}; it must be 1 (SERVING)")
    return "grpc.health.v1.Health/Check says SERVING"


async def read_model(service: str, asking: Awaitable[ModelInfo], seconds: float) -> ModelInfo:
    """The model of a service, which must answer in time."""
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise ServiceUnavailableError(f"{service}: no answer within {seconds:g} s") from None


async def play_checks(
    service: str, names: Iterable[str], play: Callable[[str], Awaitable[str]]
) -> list[Finding]:
    """A finding for each check. Without a model that can be described no other check means anything."""
    findings = []
    for name in names:
        try:
            findings.append(Finding.ok(name, await play(name)))
        except TandemError as error:
            findings.append(Finding.problem(name, str(error).removeprefix(f"{service}: ")))
            if name == "model":
                break
    return findings
