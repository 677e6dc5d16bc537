"""The means that a pool gives each `Member`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc.aio

from coordinator.replicas.hangs import VerificationTimes
from tandem.replica import Role
from tandem.types import ModelInfo


class Client(Protocol):
    """Calls one service."""

    async def model_info(self) -> ModelInfo:
        """Its model."""


ClientT = TypeVar("ClientT", bound=Client)


@dataclass(frozen=True, slots=True)
class Means(Generic[ClientT]):
    """Callbacks and factories that a member gets from its pool."""

    role: Role
    open_channel: Callable[[int], grpc.aio.Channel]
    """Opens a channel to the member's address, for messages of at most so many bytes."""
    credentials_state: Callable[[], object]
    """Differs once the files that channels are opened with were renewed."""
    message_limit: Callable[[], int]
    """Maximum bytes of a message of the fleet's models, as far as they are known."""
    make_client: Callable[[grpc.aio.Channel], ClientT]
    judge: Callable[[ModelInfo], str]
    """Reason why a replica with this model cannot join; empty when it can."""
    probe: Callable[[ClientT], Awaitable[None]]
    """Has it do a little of its work. Raises TandemError when it does not."""
    verification_times: VerificationTimes
    """Those of the pool."""
    changed: Callable[[], None]
    """To be called whenever the member's state changes."""
