"""Checks of a service's conformance: what they have in common, and how they are played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
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


class Client(Protocol):
    """A client of the service that is tested."""

    def model_info(self) -> Awaitable[ModelInfo]:
        """The service's description of its model."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The checks of one kind of service, with the classes through which they speak to it."""

    client: Callable[[grpc.aio.Channel], Client]
    subject: type[Subject]
    conversation: type[Conversation[Any, Any]]
    checks: Mapping[str, Any]
    """By name."""

    async def play(self, name: str, subject: Subject) -> str:
        """Play one check on a stream of its own, so that one failure explains no other."""
        async with self.conversation(subject) as talk:
            found: str = await self.checks[name](subject, talk)
            return found

    async def check(self, channel: grpc.aio.Channel, seconds: float) -> list[Finding]:
        """A finding for each check. Without a model that can be described no other check means anything."""
        service = self.conversation.service
        model = await read_model(service, self.client(channel).model_info(), seconds)
        subject = self.subject(channel, model, seconds)
        findings = []
        for name in self.checks:
            try:
                findings.append(Finding.ok(name, await self.play(name, subject)))
            except TandemError as error:
                findings.append(Finding.problem(name, str(error).removeprefix(f"{service}: ")))
                if name == "model":
                    break
        return findings
