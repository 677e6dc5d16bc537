"""The process of a target with a draft beside it: TargetService and DraftService on one port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from draft_service.servicer import DraftServicer
from tandem.config.names import BOUND_METHODS, MTP, OWN_METHODS, canonical_method, checkpoint_method
from tandem.errors import ConfigurationError
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.process import in_daemon_thread
from tandem.serving.server import Service
from tandem.telemetry.streams import observer_for
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings, check_extraction

if TYPE_CHECKING:
    from bound_service.loading import BoundPair


def head_folder(settings: TargetSettings) -> Path | None:
    """Where the head is; None if the target's own checkpoint has it.

    Raises:
        ConfigurationError: the settings name no folder, or one where none belongs.
    """
    folder = settings.draft_model
    if canonical_method(settings.speculative_method or "") in OWN_METHODS:
        if folder is not None:
            raise ConfigurationError(
                f"--method is {settings.speculative_method}, whose weights lie in the target's own checkpoint, and "
                f"--draft-model is {folder}; leave out --draft-model"
            )
        return None
    if folder is None:
        raise ConfigurationError(
            "--draft-model is missing; give the folder of a drafting head for this model"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"--draft-model is {folder}; there is no such folder")
    return folder


def head_method(settings: TargetSettings, folder: Path | None) -> str:
    """The method that the settings name, or else the one that the head's checkpoint implies.

    Args:
        settings: The target's.
        folder: What `head_folder` found.

    Raises:
        ConfigurationError: it is none of those that read a target's hidden states.
    """
    given = settings.speculative_method
    if folder is None:
        return canonical_method(given or MTP)
    found = checkpoint_method(folder)
    method = found if given is None else canonical_method(given)
    hosted = [each for each in BOUND_METHODS if each not in OWN_METHODS]
    if method not in hosted:
        raise ConfigurationError(
            f"--method is {given or found or 'not given'} for the draft {folder}; beside a target it must be "
            f"{' or '.join(hosted)}"
        )
    return method


class BoundService(Service):
    """Serves a target, and proposals of a head that reads it."""

    name = "target"
    full_names = (
        target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    )

    def __init__(self, settings: TargetSettings) -> None:
        """Prepare to load both.

        Raises:
            ConfigurationError: the settings name no draft, or another method than the ones that run here.
        """
        check_extraction(settings)
        self._settings = settings
        self._head_folder = head_folder(settings)
        head_method(settings, self._head_folder)
        self._observer = observer_for(settings, self.name)
        self._target, self._draft = TargetServicer(self._observer), DraftServicer()
        self._pair: BoundPair | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add both servicers."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._target, server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._draft, server)

    def open_other_endpoints(self, readiness: ReadinessInterceptor, calls: RunningCalls) -> None:
        """Accept shared streams as well."""
        for servicer in (self._target, self._draft):
            servicer.streams.apply_limits(readiness, calls, self._settings.max_concurrent_streams)

    async def start(self) -> None:
        """Load both.

        Raises:
            ConfigurationError: the target cannot be served as the settings ask, or the head is not
                one of this target's.
        """
        self._observer.start()
        pair = self._pair = await in_daemon_thread(self._load)
        await pair.verifier.start()
        await pair.proposer.start()
        self._observer.ready(pair.verifier.model_info.name, pair.verifier.kv_usage)
        self._target.verifier, self._draft.proposer = pair.verifier, pair.proposer

    @property
    def overdue_seconds(self) -> float:
        """How long an engine has been stuck in a step; 0 while all is well."""
        if self._pair is None:
            return 0.0
        return max(self._pair.verifier.overdue_seconds, self._pair.proposer.overdue_seconds)

    async def close(self) -> None:
        """Stop both engines."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._observer.close)
            if self._pair is not None:
                stack.push_async_callback(self._pair.verifier.close)
                stack.push_async_callback(self._pair.proposer.close)

    def _load(self) -> BoundPair:
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
        from bound_service.loading import load_pair

        settings = self._settings.model_copy(update={"model": folder})
        return load_pair(settings, self._head_folder, self._observer.on_step, on_failure=self.fail)
