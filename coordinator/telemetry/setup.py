"""Joins the coordinator to its telemetry, when it has any."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.telemetry.observer import Observer, State
from tandem.telemetry.settings import telemetry_for

if TYPE_CHECKING:
    from coordinator.telemetry.observed import ObservedRequests
    from tandem.telemetry.process import Telemetry


class CoordinatorTelemetry:
    """The observer of the requests, and the metrics of the process."""

    def __init__(self, settings: CoordinatorSettings, process: Telemetry | None) -> None:
        """Telemetry of the process; nothing is collected without it."""
        self._settings = settings
        self._process = process
        self._observed: ObservedRequests | None = None
        if process is not None:
            from coordinator.telemetry.observed import ObservedRequests

            self._observed = ObservedRequests(process.registry, process.tracer, settings.trace_rounds)
        self.observer: Observer = self._observed or Observer()
        """The observer of the request path."""
        self._probe: EventLoopProbe | None = None

    @classmethod
    def of(cls, settings: CoordinatorSettings, is_read: bool = False) -> CoordinatorTelemetry:
        """Build the telemetry that the settings ask for.

        Args:
            is_read: Whether anything besides the Prometheus port reads `prometheus_text`.
        """
        return cls(settings, telemetry_for(settings, "coordinator", is_read))

    def start(self) -> None:
        """Begin to serve and send.

        Raises:
            ConfigurationError: the Prometheus port cannot be bound.
        """
        if self._process is not None:
            self._process.start()

    def ready(self, model_name: str, state: Callable[[], State]) -> None:
        """The services are connected: name the target model from now on, and report the coordinator's state."""
        if self._process is None or self._observed is None:
            return
        from coordinator.telemetry.metrics import state_metrics
        from tandem.telemetry.metrics import AtScrape

        observed = self._observed
        metrics = observed.serve(model_name, self._settings.measure_waits)
        if metrics.event_loop_wait is not None:
            self._probe = EventLoopProbe(metrics.event_loop_wait.observe)
            self._probe.start()
        self._process.registry.register(
            AtScrape(lambda: (state(), observed.streams.bytes()), lambda read: state_metrics(*read))
        )

    async def close(self) -> None:
        """Send the rest, as far as that is quick."""
        if self._probe is not None:
            await self._probe.close()
        if self._process is not None:
            await self._process.close()

    def prometheus_text(self) -> tuple[bytes, str] | None:
        """All metrics in Prometheus's text form, and its content type; None when none are collected.

        On the event loop, or on any other thread while the loop turns.
        """
        return None if self._process is None else self._process.prometheus_text()


class EventLoopProbe:
    """Measures how long the event loop takes to get to what has come: a thread wakes it at regular intervals.

    gRPC hands over an answer the same way: its own thread wakes the loop, whose next turn wakes the task that reads. So
    a probe waits as long as an answer that comes at the same moment. A loop that is held up for long is probed all the
    while, so that a long wait counts as often as it deserves.
    """

    def __init__(self, observe: Callable[[float], None], interval_seconds: float = 0.005) -> None:
        """Begin with `start`.

        Args:
            observe: Receives each wait in seconds, on the event loop.
            interval_seconds: Time between two probes. A probe costs some 20 us.
        """
        self._observe = observe
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to probe the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._probe, args=(loop,), name="event loop probe", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Stop."""
        self._ended.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                loop.call_soon_threadsafe(self._woken, loop, time.perf_counter())
            except RuntimeError:  # the loop was closed
                return

    def _woken(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        loop.call_soon(lambda: self._observe(time.perf_counter() - began))
