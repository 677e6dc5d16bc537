"""The draft's process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio

from draft_service.proposers import Proposer
from draft_service.proposers.model_free import SequenceLimits
from draft_service.proposers.ngram import ngram_proposer
from draft_service.proposers.suffix import suffix_proposer
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftSettings
from tandem.config.names import BOUND_METHODS
from tandem.errors import ConfigurationError
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.process import in_daemon_thread
from tandem.serving.server import Service
from tandem.telemetry.streams import OnStep, observer_for
from tandem.v1 import draft_pb2, draft_pb2_grpc


class DraftService(Service):
    """Serves DraftService with one drafting method."""

    name = "draft"
    full_names = (draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,)

    def __init__(self, settings: DraftSettings) -> None:
        """Prepare the method that the settings name.

        Raises:
            ConfigurationError: an option of that method is wrong or missing.
        """
        self._settings = settings
        self._observer = observer_for(settings, self.name)
        self._load = _loader(settings, self._observer.on_step, self.fail)
        self._servicer = DraftServicer(self._observer)
        self._proposer: Proposer | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)

    def open_other_endpoints(self, readiness: ReadinessInterceptor, calls: RunningCalls) -> None:
        """Accept shared streams as well."""
        self._servicer.streams.apply_limits(readiness, calls, self._settings.max_concurrent_streams)

    async def start(self) -> None:
        """Load what the drafting method needs.

        Raises:
            ConfigurationError: the method cannot run as the settings ask.
        """
        self._observer.start()
        self._proposer = await in_daemon_thread(self._load)
        await self._proposer.start()
        self._observer.ready(self._proposer.model_info.name, self._proposer.kv_usage)
        self._servicer.proposer = self._proposer

    @property
    def overdue_seconds(self) -> float:
        """How long the drafting method has been stuck in a step; 0 while all is well."""
        return 0.0 if self._proposer is None else self._proposer.overdue_seconds

    async def close(self) -> None:
        """Let go of it."""
        if self._proposer is not None:
            await self._proposer.close()
        await self._observer.close()


def _loader(
    settings: DraftSettings, on_step: OnStep, on_failure: Callable[[], None]
) -> Callable[[], Proposer]:
    """Return the loader of the drafting method. Bad options are refused before anything is loaded."""
    limits = SequenceLimits(settings.max_length, settings.max_sequences)
    match settings.method:
        case "ngram":
            return partial(ngram_proposer, settings, limits)
        case "suffix":
            return partial(suffix_proposer, settings, limits)
        case method if method in BOUND_METHODS:
            raise ConfigurationError(
                f"speculative_method is {method}, which reads the target's hidden states and runs in its process: "
                "start the target with --draft-model or --method mtp, and no draft service"
            )
        case _:
            return partial(_load_standalone, settings, settings.checkpoint, on_step, on_failure)


def _load_standalone(
    settings: DraftSettings, checkpoint: Path, on_step: OnStep, on_failure: Callable[[], None]
) -> Proposer:
    from tandem.engine.models.checkpoint import open_checkpoint
    from tandem.engine.threads import switch_early, wait_asleep
    from tandem.model_sources.bundled import require_engine
    from tandem.model_sources.find import find_model

    # Torch takes seconds to import: refuse a wrong folder before.
    require_engine()
    folder = find_model(checkpoint, settings.revision)
    open_checkpoint(folder)
    wait_asleep()
    switch_early()
    from draft_service.proposers.standalone import load_standalone

    return load_standalone(settings.model_copy(update={"model": folder}), on_step, on_failure)
