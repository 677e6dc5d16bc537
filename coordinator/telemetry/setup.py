"""Joins the coordinator to its telemetry, when it has any."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.telemetry.observer import NO_OBSERVER, Observer
from tandem.replica import ReplicaSnapshot
from tandem.speculation_state import SpeculationDecision
from tandem.telemetry.settings import telemetry_for

if TYPE_CHECKING:
    from coordinator.telemetry.observed import ObservedRequests
    from tandem.telemetry.process import Telemetry


_INTERVAL_SECONDS = 0.005


class EventLoopProbe:
    """Wakes the loop from a thread at regular intervals, and times it.

    gRPC hands over an answer the same way: its own thread wakes the loop, whose next turn wakes the task that reads. So
    a probe waits as long as an answer that comes at the same moment. A loop that is held up for long is probed all the
    while, so that a long wait counts as often as it deserves.
    """

    def __init__(self, observe: Callable[[float], None], interval_seconds: float = _INTERVAL_SECONDS) -> None:
        """Begin with `start`.

        Args:
            observe: Receives each wait in seconds, on the event loop.
            interval_seconds: Time between two probes.
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
            self._thread = None

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                loop.call_soon_threadsafe(self._woken, loop, time.perf_counter())
            except RuntimeError:  # the loop was closed
                return

    def _woken(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        loop.call_soon(self._read, began)

    def _read(self, began: float) -> None:
        self._observe(time.perf_counter() - began)


class HasLoad(Protocol):
    """Counts requests."""

    @property
    def running(self) -> int:
        """Number of requests that run now."""

    @property
    def queued(self) -> int:
        """Number of requests that wait for a place now."""


class HasReplicas(Protocol):
    """Knows the replicas."""

    def snapshots(self) -> Sequence[ReplicaSnapshot]:
        """Every replica at this moment."""


class HasDecisions(Protocol):
    """Decides how much to propose."""

    def decisions(self) -> Iterable[SpeculationDecision]:
        """Decisions for each load so far."""


class CoordinatorTelemetry:
    """The observer of the requests, and the metrics of the process."""

    def __init__(self, settings: CoordinatorSettings, process: Telemetry | None) -> None:
        """Telemetry of the process; nothing is collected without it."""
        self._settings = settings
        self.observer: Observer = NO_OBSERVER
        """The observer of the request path."""
        self.process = process
        self._observed: ObservedRequests | None = None
        if self.process is not None:
            self.observer = self._observed = _observed(self.process, settings)
        self._probe: EventLoopProbe | None = None

    @classmethod
    def of(cls, settings: CoordinatorSettings, is_read: bool = False) -> CoordinatorTelemetry:
        """Build the telemetry that the settings ask for.

        Args:
            settings: Where telemetry goes.
            is_read: Whether anything besides the Prometheus port reads `prometheus_text`.
        """
        return cls(settings, telemetry_for(settings, "coordinator", is_read))

    def start(self) -> None:
        """Begin to serve and send.

        Raises:
            ConfigurationError: the Prometheus port cannot be bound.
        """
        if self.process is not None:
            self.process.start()

    def ready(
        self, model_name: str, admission: HasLoad, replicas: HasReplicas, speculation: HasDecisions
    ) -> None:
        """The services are connected: name the target model from now on, and report load, replicas and decisions."""
        if self.process is None or self._observed is None:
            return
        from coordinator.telemetry.metrics import State, StateCollector

        observed = self._observed
        metrics = observed.serve(model_name, self._settings.num_speculative_tokens)
        if metrics.event_loop_wait is not None:
            self._probe = EventLoopProbe(metrics.event_loop_wait.observe)
            self._probe.start()

        def read() -> State:
            return State(
                model_name,
                admission.running,
                admission.queued,
                list(replicas.snapshots()),
                observed.recent.total(),
                list(speculation.decisions()),
            )

        self.process.registry.register(StateCollector(read))

    async def close(self) -> None:
        """Send the rest, as far as that is quick."""
        if self._probe is not None:
            await self._probe.close()
        if self.process is not None:
            await self.process.close()

    def prometheus_text(self) -> tuple[bytes, str] | None:
        """All metrics in Prometheus's text form, and its content type; None when none are collected.

        On the event loop, or on any other thread while the loop turns.
        """
        return None if self.process is None else self.process.prometheus_text()


def _observed(telemetry: Telemetry, settings: CoordinatorSettings) -> ObservedRequests:
    from coordinator.telemetry.metrics import CoordinatorMetrics
    from coordinator.telemetry.observed import ObservedRequests

    metrics = CoordinatorMetrics(telemetry.registry, measures_waits=settings.measure_waits)
    return ObservedRequests(metrics, telemetry.tracer, settings.trace_rounds)
