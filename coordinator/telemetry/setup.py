"""Joins the coordinator to its telemetry, when it has any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.admission import Admission
from coordinator.observer import NO_OBSERVER, Observer
from coordinator.replicas import Replicas
from coordinator.settings import CoordinatorSettings
from tandem.telemetry.choice import telemetry_for

if TYPE_CHECKING:
    from coordinator.telemetry.observed import ObservedRequests
    from tandem.telemetry.process import Telemetry


class CoordinatorTelemetry:
    """The observer of the requests, and the metrics of the process."""

    def __init__(self, settings: CoordinatorSettings, process: Telemetry | None) -> None:
        """Nothing is collected without a `process`."""
        self._settings = settings
        self.observer: Observer = NO_OBSERVER
        """What the request path tells."""
        self.process = process
        self._observed: ObservedRequests | None = None
        if self.process is not None:
            self.observer = self._observed = _observed(self.process, settings.trace_rounds)

    @classmethod
    def of(cls, settings: CoordinatorSettings, is_read: bool = False) -> CoordinatorTelemetry:
        """What the settings ask for.

        Args:
            settings: Where telemetry goes.
            is_read: Whether something besides the Prometheus port reads `prometheus_text`.
        """
        return cls(settings, telemetry_for(settings, "coordinator", is_read))

    def start(self) -> None:
        """Begin to serve and send.

        Raises:
            ConfigurationError: the Prometheus port cannot be bound.
        """
        if self.process is not None:
            self.process.start()

    def ready(self, model_name: str, admission: Admission, replicas: Replicas) -> None:
        """The services were joined: name the target model from now on, and tell of load and replicas."""
        if self.process is None or self._observed is None:
            return
        from coordinator.telemetry.state import State, StateCollector

        observed = self._observed
        observed.serve(model_name, self._settings.num_speculative_tokens)

        def read() -> State:
            return State(
                model_name,
                admission.running,
                admission.queued,
                replicas.snapshots(),
                observed.recent.total(),
            )

        self.process.registry.register(StateCollector(read))

    async def close(self) -> None:
        """Send what is left, as far as that is quick."""
        if self.process is not None:
            await self.process.close()

    def prometheus_text(self) -> tuple[bytes, str] | None:
        """All metrics in Prometheus's text form, and its content type; None when none are collected.

        On the event loop, or on any other thread while the loop turns.
        """
        return None if self.process is None else self.process.prometheus_text()


def _observed(telemetry: Telemetry, trace_rounds: float) -> ObservedRequests:
    from coordinator.telemetry.metrics import CoordinatorMetrics
    from coordinator.telemetry.observed import ObservedRequests

    return ObservedRequests(CoordinatorMetrics(telemetry.registry), telemetry.tracer, trace_rounds)
