"""The target's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from tandem.errors import ConfigurationError
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.process import in_daemon_thread
from tandem.serving.server import Service
from tandem.telemetry.streams import observer_for
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings, check_extraction

if TYPE_CHECKING:
    from target_service.verifier import Verifier


class TargetService(Service):
    """Serves TargetService with one model."""

    name = "target"
    full_names = (target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,)

    def __init__(self, settings: TargetSettings) -> None:
        """Prepare to load the model.

        Raises:
            ConfigurationError: the settings name a draft, which another package hosts.
        """
        if settings.draft_model is not None:
            raise ConfigurationError(
                f"--draft-model is {settings.draft_model}; a target with a draft beside it is started by "
                "`tandem serve target` or `python -m bound_service`"
            )
        check_extraction(settings)
        self._settings = settings
        self._observer = observer_for(settings, self.name)
        self._servicer = TargetServicer(self._observer)
        self._verifier: Verifier | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._servicer, server)

    def open_other_endpoints(self, readiness: ReadinessInterceptor, calls: RunningCalls) -> None:
        """Accept shared streams as well."""
        self._servicer.streams.apply_limits(readiness, calls, self._settings.max_concurrent_streams)

    async def start(self) -> None:
        """Load the model.

        Raises:
            ConfigurationError: the model cannot be served as the settings ask.
        """
        self._observer.start()
        self._verifier = await in_daemon_thread(self._load)
        await self._verifier.start()
        self._observer.ready(self._verifier.model_info.name, self._verifier.kv_usage)
        self._servicer.verifier = self._verifier

    @property
    def overdue_seconds(self) -> float:
        """How long the engine has been stuck in a step; 0 while all is well."""
        return 0.0 if self._verifier is None else self._verifier.overdue_seconds

    async def close(self) -> None:
        """Stop the engine."""
        if self._verifier is not None:
            await self._verifier.close()
        await self._observer.close()

    def _load(self) -> Verifier:
        from tandem.engine.models.checkpoint import open_checkpoint
        from tandem.engine.threads import switch_early, wait_asleep
        from tandem.model_sources.bundled import require_engine
        from tandem.model_sources.find import find_model

        # Torch takes seconds to import: refuse a wrong folder before.
        require_engine()
        folder = find_model(self._settings.model, self._settings.revision)
        open_checkpoint(folder)
        wait_asleep()
        switch_early()
        from target_service.verifier import load_verifier

        settings = self._settings.model_copy(update={"model": folder})
        return load_verifier(settings, self._observer.on_step, self.fail)
