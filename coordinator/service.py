"""What the coordinator's process serves: it meets its services, checks the rules, and answers clients."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc.aio

from coordinator.completions import Completions, Services
from coordinator.draft_client import DraftClient
from coordinator.live_config import LiveConfig
from coordinator.observer import NoObserver, Observer
from coordinator.rules import Deployment, check_models
from coordinator.servicer import GenerationServicer
from coordinator.settings import CoordinatorSettings
from coordinator.target_client import TargetClient
from coordinator.tokenizer import read_tokenizer
from tandem.channels import DEFAULT_MESSAGE_LIMIT_BYTES, message_limit, open_channel
from tandem.client import serves
from tandem.errors import ServiceUnavailableError
from tandem.v1 import generation_pb2, generation_pb2_grpc

logger = logging.getLogger(__name__)

# Most rows that one answer may hold, for the limit on a message's size.
_MOST_ROWS = 33


class CoordinatorService:
    """Serves GenerationService over a draft service and a target service."""

    name = "coordinator"
    full_names = (generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,)
    request_drain: Callable[[], None]
    """Set by the server: ends it as SIGTERM does."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.live_config = LiveConfig(settings)
        self.observer: Observer = NoObserver()
        self.completions = Completions(self.live_config, self.observer)
        self._channels: list[grpc.aio.Channel] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.completions), server
        )

    async def start(self) -> None:
        """Wait for the services, and refuse models that do not go together.

        Raises:
            ServiceUnavailableError: a service is not ready in time.
            IncompatibleModelsError: draft and target break a rule.
        """
        settings = self._settings
        channel = await self._ready("target", settings.target_address)
        target_info = await TargetClient(channel).model_info()
        limit = message_limit(target_info.vocabulary_size, _MOST_ROWS)
        target = TargetClient(self._open(settings.target_address, limit))
        draft, draft_info = None, None
        if settings.draft_address is not None:
            draft = DraftClient(await self._ready("draft", settings.draft_address, limit))
            draft_info = await draft.model_info()
        check_models(Deployment(settings, target_info, draft_info))
        tokenizer = read_tokenizer(await target.tokenizer_files())
        self.completions.connect(Services(target, draft, target_info, draft_info, tokenizer))
        logger.info(
            "services joined",
            extra={
                "target": settings.target_address,
                "draft": settings.draft_address,
                "model": target_info.name,
            },
        )

    async def close(self) -> None:
        """Close the channels, and log what is left to tell."""
        self.completions.figures.close()
        for channel in self._channels:
            await channel.close()

    async def _ready(
        self, name: str, address: str, message_limit_bytes: int = DEFAULT_MESSAGE_LIMIT_BYTES
    ) -> grpc.aio.Channel:
        """A channel to a service that serves."""
        channel = self._open(address, message_limit_bytes)
        if await serves(channel, self._settings.start_timeout_seconds):
            return channel
        raise ServiceUnavailableError(
            f"the {name} service at {address} was not ready within {self._settings.start_timeout_seconds:g} s; "
            f"start it, or name another with --{name}-address"
        )

    def _open(self, address: str, message_limit_bytes: int = DEFAULT_MESSAGE_LIMIT_BYTES) -> grpc.aio.Channel:
        channel = open_channel(address, message_limit_bytes, self._settings.service_credentials)
        self._channels.append(channel)
        return channel
