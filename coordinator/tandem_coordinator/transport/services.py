"""Tells a draft service from a target service, for an address that was given for the other kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from tandem.errors import IncompatibleModelsError
from tandem.model.replica import Role
from tandem.model.types import ModelInfo
from tandem.telemetry.logs import escape
from tandem.v1 import draft_pb2, target_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire.common import model_info_from_proto

_SECONDS = 5.0
"""Timeout of the question whether a service is of the other kind."""


class OtherServiceError(IncompatibleModelsError):
    """An address belongs to a service of the other kind."""

    def __init__(self, found: Role, model: ModelInfo) -> None:
        self.found = found
        self.wanted = _other(found)
        self.name = escape(model.name)
        sentence = f"a {found.value} service is at this address ({self.name}); it must be a {self.wanted.value} service"
        if found is Role.TARGET:
            head = f"as this one by {escape(model.drafting_method)}"
            own = head if model.drafting_method else "but this one has none"
            sentence += f": a target drafts by a head of its own without a draft address, {own}"
        super().__init__(sentence)


def _other(role: Role) -> Role:
    return Role.DRAFT if role is Role.TARGET else Role.TARGET


@asynccontextmanager
async def recognize_others(channel: grpc.aio.Channel, wanted: Role) -> AsyncIterator[None]:
    """Raise an OtherServiceError where the block's call finds no such service, since the other kind is there."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        found = _other(wanted)
        if (model := await _ask_for_model(channel, found)) is None:
            raise
        raise OtherServiceError(found, model) from error


async def _ask_for_model(channel: grpc.aio.Channel, role: Role) -> ModelInfo | None:
    """The model of a service of this role; None where there is no such service."""
    try:
        if role is Role.TARGET:
            target = TargetServiceStub(channel)
            request = target_pb2.TargetServiceGetModelInfoRequest()
            return model_info_from_proto((await target.GetModelInfo(request, timeout=_SECONDS)).model_info)
        draft = DraftServiceStub(channel)
        asked = draft_pb2.DraftServiceGetModelInfoRequest()
        return model_info_from_proto((await draft.GetModelInfo(asked, timeout=_SECONDS)).model_info)
    except grpc.aio.AioRpcError:
        return None
