"""A service that answers by a model, or by a drafting method that has none."""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc.aio

from tandem.config.settings import ModelServerSettings
from tandem.model.types import ModelInfo
from tandem.model_sources.bundled import require_engine
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import Service, announce, in_daemon_thread
from tandem.serving.streams import SequenceStreams
from tandem.serving.weights import WeightsControl
from tandem.serving.weights_servicer import register_weights
from tandem.telemetry.progress import Progress
from tandem.telemetry.settings import TelemetryOptions, is_observed
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver

if TYPE_CHECKING:
    from tandem.engine.interface import KvUsage


SettingsT = TypeVar("SettingsT", bound=ModelServerSettings)


class ServedModel(Protocol):
    """A target's verifier or a drafting method, as the service that runs it sees it."""

    @property
    def model_info(self) -> ModelInfo:
        """Information about the model, or about the method."""

    def kv_usage(self) -> KvUsage | None:
        """Usage of its KV cache; None when it has none. Called on the event loop."""

    @property
    def overdue_seconds(self) -> float:
        """Seconds that it has been stuck in a step; 0 while all is well."""

    async def start(self) -> None:
        """Begin to work, and warm up. Called before anything else."""

    async def close(self) -> None:
        """Stop, and release the model."""


class ModelService(Service):
    """Loads its models in the background, and reports what they do."""

    streams: Sequence[SequenceStreams]
    """Those of its servicers."""

    def __init__(self, settings: ModelServerSettings) -> None:
        self._observer = _observer_for(settings, self.name)
        self._shown_model: object = settings.model
        self.models: Sequence[ServedModel] = ()
        self._weights = WeightsControl(self.name, settings.weights_root, lambda: self.readiness, self.fail)
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def load(self) -> Sequence[ServedModel]:
        """Load the models and hand each to its servicer; telemetry shows the first. Called on a thread of its own."""

    def with_folder(self, settings: SettingsT, reference: str | Path) -> SettingsT:
        """The settings with the checked folder of the model that a reference names, which may be fetched first."""
        require_engine()
        # Imported here, since it needs these packages
        from tandem.model_sources.find import checked_folder

        return settings.model_copy(update={"model": checked_folder(settings, reference)})

    def register(self, server: grpc.aio.Server) -> None:
        register_weights(server, self._weights)

    def open_other_endpoints(self, calls: RunningCalls) -> None:
        for streams in self.streams:
            streams.calls = calls

    async def start(self) -> None:
        self._observer.start()
        self._loop = asyncio.get_running_loop()
        program = f"tandem {self.name}"
        with Progress(program, sys.stdout) as progress:
            loading = f"loading {self._shown_model or 'the draft'}"
            announce(f"{program}: {loading}")
            progress.show(loading)
            self.models = await in_daemon_thread(self.load)
            announce(f"{program}: warming up")
            progress.show("warming up")
            for model in self.models:
                await model.start()
        self._weights.serve(self.models[0])
        self._observer.ready(self.models[0].model_info.name, self.models[0].kv_usage)

    @property
    def overdue_seconds(self) -> float:
        return max((model.overdue_seconds for model in self.models), default=0.0)

    def fail(self) -> None:
        """End the server with an error, because the engine has failed, on whichever thread. Running calls may still
        finish."""
        self.failure = "the engine has failed, and the log has the reason; start the service again"
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request_drain)

    async def close(self) -> None:
        """Stop the models, the last first, and send the rest of the telemetry."""
        await self._weights.close()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._observer.close)
            for model in self.models:
                stack.push_async_callback(model.close)


def _observer_for(options: TelemetryOptions, role: str) -> ServiceObserver:
    """The observer of a service with these settings, which is draft or target."""
    if not is_observed(options):
        return NO_SERVICE_OBSERVER
    from tandem.telemetry.service import ObservedService

    return ObservedService(options, role)
