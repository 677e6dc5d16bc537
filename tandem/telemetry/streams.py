"""What a servicer tells of its streams. Telemetry listens here when there is any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.telemetry.choice import telemetry_for
from tandem.telemetry.settings import TelemetryOptions

if TYPE_CHECKING:
    from tandem.engine.cache import KvUsage
    from tandem.engine.worker import StepRecord

OnStep: TypeAlias = "Callable[[StepRecord], None] | None"
"""Told of each of an engine's steps, on the engine's thread; None: nobody listens."""


class StreamWatch(Protocol):
    """Watches one stream."""

    def opened(self) -> None:
        """The sequence has its place."""

    def asked(self) -> None:
        """A step arrived."""

    def answered(self, token_count: int) -> None:
        """Its answer is ready, with so many tokens or rows."""


class ServiceWatch(Protocol):
    """Watches a draft or target service."""

    @property
    def on_step(self) -> OnStep:
        """What the engine tells of its steps."""

    def start(self) -> None:
        """The service begins to start.

        Raises:
            ConfigurationError: telemetry cannot be served as it is set up.
        """

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """It is ready; `kv_usage` tells what its KV cache holds, if it has one. Called on the event loop."""

    def stream(self, request_id: str, traceparent: str) -> AbstractContextManager[StreamWatch]:
        """Watch a stream for as long as the block lasts."""

    async def close(self) -> None:
        """The service ends."""


class NoWatch:
    """Watches nothing, at no cost."""

    on_step: OnStep = None

    def start(self) -> None:
        """Nothing."""

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """Nothing."""

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[NoWatch]:
        """Itself."""
        yield self

    def opened(self) -> None:
        """Nothing."""

    def asked(self) -> None:
        """Nothing."""

    def answered(self, token_count: int) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""


NO_WATCH = NoWatch()


def watch_for(options: TelemetryOptions, role: str) -> ServiceWatch:
    """What watches a service that was set up like this; nothing when nobody would see it.

    Args:
        options: Where telemetry goes.
        role: draft or target.
    """
    telemetry = telemetry_for(options, role)
    if telemetry is None:
        return NO_WATCH
    from tandem.telemetry.service import WatchedService

    return WatchedService(telemetry, role)
