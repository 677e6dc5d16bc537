"""Readiness of a server: it refuses calls while it loads, is stuck or drains, and its health says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from grpc_health.v1 import health, health_pb2

from tandem.serving.interceptors.readiness import ReadinessInterceptor

logger = logging.getLogger(__name__)

_STALL_CHECK_SECONDS = 0.5
"""Interval of the check for a stuck service."""


@runtime_checkable
class CanStall(Protocol):
    """A service whose work may get stuck."""

    @property
    def overdue_seconds(self) -> float:
        """How long it has been stuck; 0 while all is well."""


class Readiness:
    """Readiness of a server: it admits or refuses calls, and reports the health status."""

    def __init__(self, name: str, full_names: Sequence[str]) -> None:
        self.interceptor = ReadinessInterceptor(f"the {name} service is still starting")
        self.health = health.aio.HealthServicer()
        self.name = name
        self._full_names = full_names

    async def announce(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        """Set this health status for the server and for each of its services."""
        for name in ("", *self._full_names):
            await self.health.set(name, status)

    async def open(self) -> None:
        """Admit calls."""
        self.interceptor.closed_because = ""
        await self.announce(health_pb2.HealthCheckResponse.SERVING)

    async def pause(self, reason: str) -> None:
        """Refuse calls with this reason until `open` is called."""
        self.interceptor.closed_because = reason
        await self.announce(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def close(self) -> None:
        """Refuse new calls; running ones continue."""
        self.interceptor.closed_because = f"the {self.name} service is draining"
        await self.health.enter_graceful_shutdown()
        logger.info("draining", extra={"service": self.name})


async def serve_until(stopping: asyncio.Event, service: object, readiness: Readiness) -> None:
    """Wait for the end, and take no new calls while the service is stuck."""
    is_paused = False
    while not stopping.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(_STALL_CHECK_SECONDS if isinstance(service, CanStall) else None):
                await stopping.wait()
        seconds = service.overdue_seconds if isinstance(service, CanStall) else 0.0
        if seconds and not is_paused:
            logger.error(
                "a step does not end", extra={"service": readiness.name, "seconds": round(seconds, 1)}
            )
            await readiness.pause(
                f"the {readiness.name} service has been stuck in a step for {seconds:.0f} s"
            )
        elif is_paused and not seconds:
            logger.warning("the step has ended", extra={"service": readiness.name})
            await readiness.open()
        is_paused = bool(seconds)
