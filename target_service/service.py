"""What the target's process serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio

from tandem.serving.calls import RunningCalls
from tandem.serving.gate import Gate
from tandem.serving.loading import in_daemon_thread
from tandem.serving.server import ENGINE_FAILED
from tandem.telemetry.streams import watch_for
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings

if TYPE_CHECKING:
    from target_service.verifier import Verifier


class TargetService:
    """Serves TargetService with one model."""

    name = "target"
    full_names = (target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,)
    request_drain: Callable[[], None]
    """Set by the server: ends it as SIGTERM does."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._watch = watch_for(settings, self.name)
        self._servicer = TargetServicer(self._watch)
        self._verifier: Verifier | None = None
        self.failure = ""
        """Why it cannot go on."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._servicer, server)

    def open_other_ways(self, gate: Gate, calls: RunningCalls) -> None:
        """Sequences also come on streams that they share."""
        self._servicer.shared.stand_behind(gate, calls, self._settings.max_concurrent_streams)

    async def start(self) -> None:
        """Load the model.

        Raises:
            ConfigurationError: the model cannot be served as the settings ask.
        """
        self._watch.start()
        self._verifier = await in_daemon_thread(self._load)
        await self._verifier.start()
        self._watch.ready(self._verifier.model_info.name, self._verifier.kv_usage)
        self._servicer.verifier = self._verifier

    async def close(self) -> None:
        """Stop the engine."""
        if self._verifier is not None:
            await self._verifier.close()
        await self._watch.close()

    def _load(self) -> Verifier:
        from tandem.engine.checkpoint import open_checkpoint
        from tandem.engine.threads import wait_asleep

        # Before torch is imported, which takes seconds: a wrong folder is told at once.
        open_checkpoint(self._settings.model)
        wait_asleep()
        from target_service.verifier import load_verifier

        return load_verifier(self._settings, self._watch.on_step, self._fail)

    def _fail(self) -> None:
        self.failure = ENGINE_FAILED
        self.request_drain()
