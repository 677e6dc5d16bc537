"""A replica that the coordinator keeps in touch with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.addresses import Address
from coordinator.averages import MovingAverage
from coordinator.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.channels import errors_of
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.types import ModelInfo, SpeculationFigures

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING

POLL_SECONDS = 0.1
"""How often a replica that does not serve is asked whether it does."""
_CONNECT_SECONDS = 1.0
_PING_SECONDS = 1.0
"""How often one that serves is asked, beside its own word when that changes."""
UNANSWERED_SECONDS = 5.0
"""A replica that does not answer for as long gets no new sequences. Its streams end by keepalive, somewhat later."""


class Client(Protocol):
    """Calls one service."""

    async def model_info(self) -> ModelInfo:
        """What its model is."""


ClientT = TypeVar("ClientT", bound=Client)


@dataclass(frozen=True, slots=True)
class Means(Generic[ClientT]):
    """What a member needs of the pool that it belongs to."""

    role: Role
    open_channel: Callable[[int], grpc.aio.Channel]
    """To the member's address, for messages of at most so many bytes."""
    credentials_state: Callable[[], object]
    """Differs once the files that channels are opened with were renewed."""
    message_limit: Callable[[], int]
    """Most bytes that a message of the fleet's models has, as far as they are known."""
    make_client: Callable[[grpc.aio.Channel], ClientT]
    judge: Callable[[ModelInfo], str]
    """Why a replica with this model cannot join; empty when it can."""
    changed: Callable[[], None]
    """To be called whenever the member's state changes."""


class Member(Generic[ClientT]):
    """Follows a replica's health, and counts what is done on it.

    While the replica serves, a Watch of the standard health protocol tells at once when it no longer does. A replica
    that does not is asked again and again instead: an open Watch would hold up its drain.
    """

    def __init__(self, address: str, origin: Address, means: Means[ClientT]) -> None:
        self.address = address
        """Resolved."""
        self.origin = origin
        """As it was given: perhaps a name that stands for several replicas."""
        self.round_trip = MovingAverage()
        self.step = MovingAverage()
        self.figures = SpeculationFigures()
        self.open_sequences = 0
        self.model: ModelInfo | None = None
        self.drained_because = ""
        """Set by whoever wants no new sequences on it, whatever the replica itself says."""
        self._means = means
        self._state = ReplicaState.CONNECTING
        self._reason = "it was not reached yet"
        self._since = time.monotonic()
        self._suspected = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._opened_with: object = None
        """Message limit and credentials of the channel."""
        self._client: ClientT | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ReplicaState:
        """Whether new sequences may go to it, and why not."""
        if self._state is ReplicaState.READY and self.drained_because:
            return ReplicaState.DRAINING
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether new sequences may go to it."""
        return self._state is ReplicaState.READY and not self.drained_because

    @property
    def client(self) -> ClientT:
        """For calls to it, once it was reached."""
        assert self._client is not None
        return self._client

    def snapshot(self) -> ReplicaSnapshot:
        """All of it at this moment."""
        return ReplicaSnapshot(
            role=self._means.role,
            address=self.address,
            state=self.state,
            reason=self.drained_because if self._state is ReplicaState.READY else self._reason,
            since_seconds=time.monotonic() - self._since,
            open_sequences=self.open_sequences,
            round_trip_seconds=self.round_trip.value,
            step_seconds=self.step.value,
            figures=self.figures,
            model=self.model,
        )

    def start(self) -> None:
        """Begin to follow it."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Let go of it. Streams that are still open on it end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    def suspect(self, reason: str) -> None:
        """A stream broke: send nothing new there until it has answered for itself."""
        if self._state is ReplicaState.READY:
            self._become(ReplicaState.DOWN, reason)
            self._suspected.set()

    def drain(self, reason: str) -> None:
        """Send nothing new there, for as long as nobody resumes it."""
        self.drained_because = reason
        self._told_of_change()

    def resume(self) -> None:
        """Send new sequences there again."""
        self.drained_because = ""
        self._told_of_change()

    async def _follow(self) -> None:
        while True:
            try:
                await self._until_serving()
                if await self._meet():
                    await self._while_serving()
            except (grpc.aio.AioRpcError, TandemError) as error:
                self._lost(_words(error))
            await asyncio.sleep(POLL_SECONDS)

    async def _until_serving(self) -> None:
        while True:
            await self._connect()
            try:
                # Waiting for the connection, so that the answer comes as soon as there is one.
                if await self._serves(_CONNECT_SECONDS, wait_for_ready=True):
                    return
                self._starting()
            except grpc.aio.AioRpcError:
                self._lost(await self._obstacle())
            await asyncio.sleep(POLL_SECONDS)

    async def _serves(self, seconds: float, *, wait_for_ready: bool = False) -> bool:
        """What the replica says when it is asked."""
        began = time.monotonic()
        answer = await self._health().Check(
            health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=wait_for_ready
        )
        self.round_trip.add(time.monotonic() - began)
        return bool(answer.status == _SERVING)

    async def _obstacle(self) -> str:
        """Why it cannot be asked, which a call that waits for the connection does not tell."""
        try:
            await self._serves(_CONNECT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return _words(error)
        return "it was slow to answer"

    async def _meet(self) -> bool:
        """Ask what it serves. Whether that fits."""
        with errors_of(f"{self._means.role.value} service"):
            self.model = await self.client.model_info()
        if reason := self._means.judge(self.model):
            self._become(ReplicaState.INCOMPATIBLE, reason)
            # It may come back with another model; until then its health is all there is to ask.
            await self._watch()
            return False
        await self._connect()
        self._suspected.clear()
        self._become(ReplicaState.READY, "")
        return True

    async def _while_serving(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._watch(), self._ping(), self._suspected.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Return when the replica says that it serves no longer."""
        call = self._health().Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in call:
                if answer.status != _SERVING:
                    if self._state is ReplicaState.READY:
                        self._become(ReplicaState.DRAINING, "it said that it drains")
                    return
        finally:
            call.cancel()
        raise ServiceUnavailableError("it ended the watch of its health")

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_SECONDS)
            await self._serves(UNANSWERED_SECONDS)

    def _starting(self) -> None:
        if self._state is not ReplicaState.DRAINING:
            self._become(ReplicaState.CONNECTING, "it is still starting")

    def _lost(self, reason: str) -> None:
        if self.model is None:
            self._become(ReplicaState.CONNECTING, f"it was not reached yet: {reason}")
        elif self._state is not ReplicaState.DOWN:
            self._become(ReplicaState.DOWN, reason)

    def _become(self, state: ReplicaState, reason: str) -> None:
        was, self._reason = self._state, reason
        if state is was:
            return
        self._state = state
        alarming = was is ReplicaState.READY or state is ReplicaState.INCOMPATIBLE
        logger.log(
            logging.WARNING if alarming else logging.INFO,
            "replica %s",
            state.value,
            extra={"role": self._means.role.value, "address": self.address, "reason": reason},
        )
        self._told_of_change()

    def _told_of_change(self) -> None:
        self._since = time.monotonic()
        self._means.changed()

    def _health(self) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(self._channel)

    async def _connect(self) -> None:
        """Open a channel; another one when the first was made before it was known how long messages get, or with
        certificates that were renewed since."""
        limit = self._means.message_limit()
        wanted = limit, self._means.credentials_state()
        if self._channel is not None and (wanted == self._opened_with or self.open_sequences > 0):
            return
        old, self._channel = self._channel, self._means.open_channel(limit)
        self._opened_with = wanted
        self._client = self._means.make_client(self._channel)
        if old is not None:
            await old.close()


def _words(error: grpc.aio.AioRpcError | TandemError) -> str:
    if isinstance(error, TandemError):
        return str(error)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it does not answer"
    return error.details() or error.code().name.lower()
