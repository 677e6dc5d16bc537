"""What the coordinator's process serves: it meets its services, and answers clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc.aio

from coordinator.admin import Administration
from coordinator.admin_servicer import AdminServicer
from coordinator.completions import Completions, Services
from coordinator.door import Door
from coordinator.live_config import LiveConfig
from coordinator.replica import ReplicaState, Role
from coordinator.replicas import Replicas
from coordinator.servicer import GenerationServicer
from coordinator.settings import CoordinatorSettings
from coordinator.telemetry.setup import CoordinatorTelemetry
from coordinator.tokenizer import read_tokenizer
from tandem.errors import ServiceUnavailableError
from tandem.serving.calls import RunningCalls
from tandem.serving.gate import Gate
from tandem.serving.server import tell
from tandem.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from coordinator.http.side import HttpSide

logger = logging.getLogger(__name__)


class CoordinatorService:
    """Serves GenerationService over draft and target services, and AdminService beside it."""

    name = "coordinator"
    full_names = (
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    )
    request_drain: Callable[[], None]
    """Set by the server: ends it as SIGTERM does."""

    def __init__(self, settings: CoordinatorSettings, telemetry: CoordinatorTelemetry | None = None) -> None:
        self._settings = settings
        self.live_config = LiveConfig(settings)
        self.telemetry = telemetry or CoordinatorTelemetry.of(
            settings, is_read=settings.http_port is not None
        )
        self.completions = Completions(self.live_config, self.telemetry.observer)
        self.replicas = Replicas(settings, settings.service_credentials)
        self.administration = Administration(self.completions, self.live_config, self.replicas)
        self._http: HttpSide | None = None

    def open_other_ways(self, gate: Gate, calls: RunningCalls) -> None:
        """Take the address for HTTP, when there is one.

        Raises:
            ConfigurationError: it cannot be bound.
        """
        if self._settings.http_port is not None:
            # Here, not above: without HTTP nothing of it is loaded.
            from coordinator.http.backend import CoordinatorBackend
            from coordinator.http.side import HttpSide

            backend = CoordinatorBackend(
                self.completions, self.administration, self.telemetry.prometheus_text
            )
            self._http = HttpSide(self._settings, backend, gate, calls)

    @property
    def http_url(self) -> str | None:
        """Where HTTP is answered; None where it is not."""
        return None if self._http is None else self._http.url

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """What decides before a request is read."""
        return (Door(self.completions),)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.completions), server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.administration), server)

    async def start(self) -> None:
        """Wait for the services, and refuse models that do not go together.

        Raises:
            ServiceUnavailableError: a service is not ready in time.
            IncompatibleModelsError: draft and target break a rule.
            ConfigurationError: the Prometheus port cannot be bound.
        """
        self.telemetry.start()
        if self._http is not None:
            self._http.start()
            tell(f"tandem coordinator: http on {self._http.url}")
        await self.replicas.start()
        target_info = self.replicas.fleet.target
        assert target_info is not None
        files = await self._tokenizer_files()
        services = Services(self.replicas, target_info, self.replicas.fleet.draft, read_tokenizer(files))
        self.completions.connect(services)
        self.telemetry.ready(target_info.name, self.completions.admission, self.replicas)
        if self._http is not None:
            self._http.meet(files)
        ready = [shot for shot in self.replicas.snapshots() if shot.state is ReplicaState.READY]
        logger.info(
            "services joined",
            extra={
                "target": ", ".join(shot.address for shot in ready if shot.role is Role.TARGET),
                "draft": ", ".join(shot.address for shot in ready if shot.role is Role.DRAFT),
                "model": target_info.name,
            },
        )

    async def close(self) -> None:
        """Let go of the services, and log what is left to tell."""
        if self._http is not None:
            await self._http.close()
        self.completions.figures.close()
        await self.telemetry.close()
        await self.replicas.close()

    async def _tokenizer_files(self) -> dict[str, bytes]:
        member = self.replicas.targets.choose()
        if member is None:
            raise ServiceUnavailableError(f"the target service left again: {self.replicas.targets.reasons()}")
        return await member.client.tokenizer_files()
