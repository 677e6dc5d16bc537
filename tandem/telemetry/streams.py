"""The observer interface of a servicer's streams. Telemetry implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.telemetry.settings import TelemetryOptions, telemetry_for

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.engine.kv_cache.arena import KvUsage

OnStep: TypeAlias = "Callable[[StepRecord], None] | None"
"""Called for each step of an engine, on the engine's thread; None: no observer."""


class StreamObserver(Protocol):
    """Observes one stream."""

    def opened(self) -> None:
        """The sequence has its place."""

    def step_arrived(self) -> None:
        """A step arrived."""

    def answered(self, token_count: int) -> None:
        """Its answer is ready, with so many tokens or rows."""


class ServiceObserver(Protocol):
    """Observes a draft or target service."""

    @property
    def on_step(self) -> OnStep:
        """Observer interface for the engine's steps."""

    def start(self) -> None:
        """The service begins to start.

        Raises:
            ConfigurationError: telemetry cannot be served as it is set up.
        """

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """The service is ready.

        `kv_usage` returns the usage of its KV cache, if it has one, and is called on the event loop.
        """

    def stream(self, request_id: str, traceparent: str) -> AbstractContextManager[StreamObserver]:
        """Observe a stream for as long as the block lasts."""

    async def close(self) -> None:
        """The service ends."""


class NoServiceObserver:
    """Observes nothing, at no cost."""

    on_step: OnStep = None

    def start(self) -> None:
        """Do nothing."""

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """Do nothing."""

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[NoServiceObserver]:
        """Return itself."""
        yield self

    def opened(self) -> None:
        """Do nothing."""

    def step_arrived(self) -> None:
        """Do nothing."""

    def answered(self, token_count: int) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


NO_SERVICE_OBSERVER = NoServiceObserver()


def observer_for(options: TelemetryOptions, role: str) -> ServiceObserver:
    """Return the observer of a service with these settings; a null observer without telemetry.

    Args:
        options: Where telemetry goes.
        role: draft or target.
    """
    telemetry = telemetry_for(options, role)
    if telemetry is None:
        return NO_SERVICE_OBSERVER
    from tandem.telemetry.service import ObservedService

    return ObservedService(telemetry, role)
