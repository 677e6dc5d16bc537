"""What the coordinator's process serves: it meets its services, checks the rules, and answers clients."""

from __future__ import annotations

import logging

import grpc.aio

from coordinator.completions import Completions, Services
from coordinator.rules import ModelPair, check_models
from coordinator.servicer import GenerationServicer
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer import fetch_tokenizer
from tandem.channels import errors_of, message_limit, open_channel
from tandem.client import serves
from tandem.errors import ServiceUnavailableError
from tandem.types import ModelInfo
from tandem.v1 import draft_pb2, generation_pb2, generation_pb2_grpc, target_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire.common import model_info_from_proto

logger = logging.getLogger(__name__)

# Most rows that one answer may hold, for the limit on a message's size.
_MOST_ROWS = 33


class CoordinatorService:
    """Serves GenerationService over a draft service and a target service."""

    name = "coordinator"
    full_names = (generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,)

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._completions = Completions(settings)
        self._channels: list[grpc.aio.Channel] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self._completions), server
        )

    async def start(self) -> None:
        """Wait for the services, and refuse models that do not go together.

        Raises:
            ServiceUnavailableError: a service is not ready in time.
            IncompatibleModelsError: draft and target break a rule.
        """
        target_address, draft_address = self._settings.target_address, self._settings.draft_address
        target_info = await self._target_info(target_address)
        limit = message_limit(target_info.vocabulary_size, _MOST_ROWS)
        target = TargetServiceStub(self._open(target_address, limit))
        draft = None
        if draft_address is not None:
            draft_info = await self._draft_info(draft_address)
            check_models(ModelPair(draft_info, target_info))
            draft = DraftServiceStub(self._open(draft_address, limit))
        self._completions.connect(Services(target, draft, target_info, await fetch_tokenizer(target)))
        logger.info(
            "services joined",
            extra={"target": target_address, "draft": draft_address, "model": target_info.name},
        )

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()

    async def _target_info(self, address: str) -> ModelInfo:
        channel = await self._ready("target", address)
        with errors_of("target service"):
            answer = await TargetServiceStub(channel).GetModelInfo(
                target_pb2.TargetServiceGetModelInfoRequest()
            )
        return model_info_from_proto(answer.model_info)

    async def _draft_info(self, address: str) -> ModelInfo:
        channel = await self._ready("draft", address)
        with errors_of("draft service"):
            answer = await DraftServiceStub(channel).GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())
        return model_info_from_proto(answer.model_info)

    async def _ready(self, name: str, address: str) -> grpc.aio.Channel:
        channel = self._open(address)
        if await serves(channel, self._settings.start_timeout_seconds):
            return channel
        raise ServiceUnavailableError(
            f"the {name} service at {address} was not ready within {self._settings.start_timeout_seconds:g} s; "
            f"start it, or name another with --{name}-address"
        )

    def _open(self, address: str, message_limit_bytes: int = 4 << 20) -> grpc.aio.Channel:
        channel = open_channel(address, message_limit_bytes)
        self._channels.append(channel)
        return channel
