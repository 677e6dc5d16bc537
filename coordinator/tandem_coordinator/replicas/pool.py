"""A replica and the pool of all replicas of one role, which follows names and health."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import (
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import Coverage, ModelInfo, SpeculationStats
from tandem.rpc.addresses import Address, Resolver, join_address, resolve
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, SERVICE_OPTIONS, open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.telemetry.logs import escape, log_fault
from tandem_coordinator.replicas.hangs import UnansweredSteps, VerificationTimes
from tandem_coordinator.stats.engines import EngineTally
from tandem_coordinator.stats.rounds import RoundTally
from tandem_coordinator.stats.speculation import MovingAverage, MovingMedian
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_coordinator.transport.services import OtherServiceError
from tandem_coordinator.transport.target_client import TargetClient

ClientT = TypeVar("ClientT", bound=TargetClient | DraftClient)


logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING

_NEEDS_OPERATOR = (ReplicaState.INCOMPATIBLE, ReplicaState.REFUSED)
"""States that a replica leaves only after somebody changes it."""

POLL_SECONDS = 0.1
"""Interval of health checks for a replica that does not serve."""
_PING_SECONDS = 1.0
"""Interval of health checks for a replica that serves, beside its Watch, and the time that one may take before."""
_STATISTICS_SECONDS = 0.5
"""Time that a replica has to say what its engine counts, for which whoever reads metrics waits."""
UNANSWERED_SECONDS = 5.0
"""A replica without an answer for so long gets no new sequences. Its streams end by keepalive, somewhat later."""


class Member(Generic[ClientT]):
    """Follows a replica's health, and counts what is done on it.

    While the replica serves, a Watch of the standard health protocol reports at once when it stops. A replica that does
    not serve is polled instead, since an open Watch would delay its drain.
    """

    def __init__(self, address: str, origin: Address, pool: Pool[ClientT]) -> None:
        self.address = address
        """Resolved."""
        self.origin = origin
        """The address as configured, perhaps a name that several replicas share."""
        self.round_trip = MovingMedian()
        self.step = MovingAverage()
        self.tally = RoundTally()
        self.engine = EngineTally()
        self.number = pool.find_free_number()
        """Tells it from the pool's other members, from 0 on, as vLLM numbers engines. A later one may have it again."""
        self.open_sequences = 0
        self.is_missed = False
        """True if its name did not include it at the last resolution."""
        self.model: ModelInfo | None = None
        self.coverage: Coverage | None = None
        """Tokens that a draft with another tokenizer shares with the target; None for one that has its tokenizer."""
        self.unanswered = UnansweredSteps(pool.verification_times)
        self._pool = pool
        self._credentials = pool.credentials.for_address(origin)
        self._state = ReplicaState.CONNECTING
        self._reason = "it was not reached yet"
        self._since = time.monotonic()
        self._suspected = asyncio.Event()
        self._must_answer_probe = False
        self._last_fault: str | None = None
        """The words of the last error in following it that nobody has foreseen."""
        self._alive_at = -math.inf
        """When the process that `model` describes last answered for itself."""
        self._met_at = -math.inf
        """When it first did."""
        self._channel: grpc.aio.Channel | None = None
        self._opened_with: object = None
        """Message limit and credentials of the channel."""
        self._client: ClientT | None = None
        self._task = asyncio.create_task(self._follow())

    @property
    def drained_because(self) -> str:
        """Why it gets no new sequences though it is ready and compatible; empty where it does."""
        if self.address in self._pool.drained:
            return "an operator drained it"
        return "its name no longer stands for this address" if self.is_missed else ""

    @property
    def outdated_because(self) -> str:
        """Why its weights keep new sequences from it, which go on where they are; empty where they do not."""
        return "" if self.model is None else self._pool.outdated(self.model)

    @property
    def state(self) -> ReplicaState:
        if self._state is ReplicaState.READY and self.drained_because:
            return ReplicaState.DRAINING
        if self._state is ReplicaState.READY and self.outdated_because:
            return ReplicaState.INCOMPATIBLE
        return self._state

    @property
    def is_ready(self) -> bool:
        """True if new sequences may go to it."""
        return self.state is ReplicaState.READY

    @property
    def weights_fingerprint(self) -> str:
        """Of the weights that it serves; empty where it does not say."""
        return "" if self.model is None or self.model.weights is None else self.model.weights.fingerprint

    def continues(self, fingerprint: str) -> bool:
        """True if a sequence that weights of this fingerprint have begun may go on here now, the newest or not."""
        return (
            self._state is ReplicaState.READY and not self.drained_because and self.may_continue(fingerprint)
        )

    def may_continue(self, fingerprint: str) -> bool:
        """True if a sequence that weights of this fingerprint have begun may go on here; empty: any."""
        weights = None if self.model is None else self.model.weights
        return not fingerprint or weights is None or weights.may_continue(fingerprint)

    @property
    def has_head(self) -> bool:
        """True for a target that drafts by itself."""
        return self.model is not None and bool(self.model.drafting_method)

    @property
    def is_doubted(self) -> bool:
        """True from an error of its own until it answers a probe."""
        return self._must_answer_probe

    @property
    def client(self) -> ClientT:
        assert self._client is not None
        return self._client

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            role=self._pool.role,
            address=self.address,
            state=self.state,
            reason=(self.drained_because or self.outdated_because)
            if self._state is ReplicaState.READY
            else self._reason,
            since_seconds=time.monotonic() - self._since,
            open_sequences=self.open_sequences,
            round_trip_seconds=self.round_trip.value,
            step_seconds=self.step.value,
            figures=self.tally.stats(),
            model=self.model,
            coverage=self.coverage,
        )

    async def close(self) -> None:
        """Close the connection, which ends the streams that are still open on it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    def has_answered(self, instance_id: str, since: float) -> bool:
        """True if this process has answered for itself since a moment of the monotonic clock: it has not died."""
        is_same = self.model is not None and self.model.instance_id == instance_id != ""
        return is_same and self._alive_at > since

    def is_newer_than(self, moment: float) -> bool:
        """True if its process was not known yet at a moment of the monotonic clock."""
        return self._met_at > moment

    async def check(self) -> None:
        """Ask for its health. Raises ServiceUnavailableError if it does not serve."""
        try:
            is_serving = await self._serves(_PING_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise ServiceUnavailableError(_words(error)) from error
        if not is_serving:
            raise ServiceUnavailableError("it does not serve")

    def suspect(self, reason: str) -> None:
        """A stream broke: send nothing new there until it has answered for itself."""
        if self._state is ReplicaState.READY:
            self._become(ReplicaState.DOWN, reason)
            self._suspected.set()

    def doubt(self, reason: str) -> None:
        """It has failed where another replica went on: send nothing new there until it has answered a probe."""
        self._must_answer_probe = True
        self.suspect(reason)

    def look_after_steps(self, more_seconds: float) -> None:
        """Ask again for verifications that take long, and give up those that it does not know or has owed for too long,
        by `more_seconds` more than usual. Then it gets no new ones until it answers a probe."""
        self.unanswered.ask_again()
        late = self.unanswered.overdue(more_seconds)
        steps = {*late, *self.unanswered.lost()}
        if not steps:
            return
        sentence = "target hangs" if late else "target does not know a step"
        logger.warning(sentence, extra={"address": self.address, "unanswered": len(steps)})
        self.doubt("it left a verification without an answer; it must answer a probe first")
        self.unanswered.give_up(steps)

    async def _follow(self) -> None:
        while True:
            try:
                await self._connect()
                if await self._is_serving() and await self._meet():
                    await self._while_serving()
            except (UnauthenticatedError, PermissionDeniedError) as error:
                self._become(ReplicaState.REFUSED, str(error))
            except (grpc.aio.AioRpcError, TandemError, TimeoutError) as error:
                self._lost(_words(error))
            except Exception as error:  # noqa: BLE001 - a replica that nobody follows would never come back
                self._report_fault(error)
                self._lost("its answer cannot be read")
            await asyncio.sleep(POLL_SECONDS)

    def _report_fault(self, error: Exception) -> None:
        """Log a fault in following it, once for as long as it is the same."""
        if str(error) != self._last_fault:
            self._last_fault = str(error)
            role = self._pool.role.value
            log_fault(logger, "replica cannot be followed", error, role=role, address=self.address)

    async def _is_serving(self) -> bool:
        try:
            # The call waits for the connection, so that it is answered as soon as there is one.
            is_serving = await self._serves(_PING_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            # Its error says why there is no connection; that of a wait does not.
            await self._serves(_PING_SECONDS)
            self._lost("it was slow to answer")
            return False
        if not is_serving and self._state is not ReplicaState.DRAINING:
            self._become(ReplicaState.CONNECTING, "it is still starting")
        if not is_serving:
            self._reason = await self._refusal() or self._reason
        return is_serving

    async def _refusal(self) -> str:
        """The replica's own words on why it does not serve: it starts, drains, sleeps, or loads weights."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self.client.model_info()
        except ServiceUnavailableError as error:
            return str(error)
        except (TandemError, TimeoutError):
            return ""
        return ""

    async def _serves(self, seconds: float, *, wait_for_ready: bool = False) -> bool:
        began = time.monotonic()
        answer = await self._health().Check(
            health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=wait_for_ready
        )
        if not wait_for_ready:
            self.round_trip.add(time.monotonic() - began)
        self.unanswered.heard(began)
        return bool(answer.status == _SERVING)

    async def _meet(self) -> bool:
        """Ask for its model. True if the model fits."""
        try:
            async with asyncio.timeout(UNANSWERED_SECONDS):
                model = await self._ask_for_model()
        except OtherServiceError as error:
            await self._refuse(str(error))
            return False
        if self.model is None or not model.instance_id or model.instance_id != self.model.instance_id:
            self._met_at = time.monotonic()
        self.model = model
        if not (reason := self._pool.judge(self.model)):
            await self._connect()
            try:
                if self._pool.map_vocabulary is not None:
                    self.coverage = await self._pool.map_vocabulary(self.client, self.model)
            except (ConfigurationError, InvalidRequestError) as error:
                reason = str(error)
        if reason:
            await self._refuse(reason)
            return False
        if self._must_answer_probe and isinstance(self.client, TargetClient):
            await self.client.probe()
        # The first check of a connection takes several times as long as later ones, and costs are predicted
        # by their median
        for _ in range(5):
            await self._serves(_PING_SECONDS)
        self._suspected.clear()
        self._alive_at = time.monotonic()
        # Not before: to a request that lost the others, one that is neither ready nor doubted is no hope.
        self._must_answer_probe = False
        self._become(ReplicaState.READY, "")
        return True

    async def _ask_for_model(self) -> ModelInfo:
        """Ask for its model, and take what its engine counts, which comes along."""
        client = self.client
        model = await client.model_info()
        if client.statistics is not None:
            self.engine.take(client.statistics, model.instance_id)
        return model

    async def ask_for_statistics(self) -> None:
        """Ask what its engine counts by now. Where it does not answer at once, the last answer stays."""
        if self._state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return
        with suppress(TandemError, TimeoutError):
            async with asyncio.timeout(_STATISTICS_SECONDS):
                await self._ask_for_model()

    async def _refuse(self, reason: str) -> None:
        """Leave it alone until it no longer serves: it may come back with another model, or as another service."""
        self._become(ReplicaState.INCOMPATIBLE, reason)
        await self._watch()

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
        """Return when the replica reports that it no longer serves."""
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
            self._alive_at = time.monotonic()
            # With its answers a draft says how busy it is; one that nobody here asks must be asked for that. A target
            # that nobody asks, because of its weights, may have loaded others between two looks at its health.
            if self.open_sequences == 0 and (self._pool.role is Role.DRAFT or self.outdated_because):
                async with asyncio.timeout(UNANSWERED_SECONDS):
                    model = await self._ask_for_model()
                if self.model is not None and model.weights != self.model.weights:
                    return  # meet it again

    def _lost(self, reason: str) -> None:
        if self.model is None:
            self._become(ReplicaState.CONNECTING, f"it was not reached yet: {reason}")
        elif self._state is not ReplicaState.DOWN:
            self._become(ReplicaState.DOWN, reason)

    def _become(self, state: ReplicaState, reason: str) -> None:
        was = self._state
        self._reason = reason
        if state is was:
            return
        self._state = state
        alarming = was is ReplicaState.READY or state in _NEEDS_OPERATOR
        logger.log(
            logging.WARNING if alarming else logging.INFO,
            "replica %s",
            state.value,
            extra={"role": self._pool.role.value, "address": self.address, "reason": reason},
        )
        self.notify_change()

    def notify_change(self) -> None:
        self._since = time.monotonic()
        self._pool.notify_change()

    def _health(self) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(self._channel)

    async def _connect(self) -> None:
        """Open a channel, or replace one that was opened before the size of messages was known or with old
        certificates."""
        limit = self._pool.message_limit()
        wanted = limit, self._credentials.files_state()
        if self._channel is not None and (wanted == self._opened_with or self.open_sequences > 0):
            return
        old = self._channel
        self._channel = open_channel(self.address, limit, self._credentials, SERVICE_OPTIONS)
        self._opened_with = wanted
        before = self._client
        self._client = self._pool.make_client(self._channel)
        if isinstance(self._client, DraftClient) and isinstance(before, DraftClient):
            self._client.load = before.load
        if old is not None:
            await old.close()


def _words(error: grpc.aio.AioRpcError | TandemError | TimeoutError) -> str:
    if isinstance(error, TandemError):
        return str(error)
    if isinstance(error, TimeoutError) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it does not answer"
    return escape(error.details() or "") or error.code().name.lower()


@dataclass(eq=False)
class Pool(Generic[ClientT]):
    """Keeps in touch with every replica of one role."""

    role: Role
    addresses: Sequence[Address]
    resolve_interval_seconds: float
    make_client: Callable[[grpc.aio.Channel], ClientT]
    judge: Callable[[ModelInfo], str]
    """Reason why a replica with this model cannot join; empty when it can."""
    credentials: Credentials = PLAIN
    message_limit: Callable[[], int] = lambda: DEFAULT_MESSAGE_LIMIT_BYTES
    """Maximum bytes of a message of the fleet's models, as far as they are known."""
    resolver: Resolver = resolve
    verification_times: VerificationTimes = field(default_factory=VerificationTimes)
    map_vocabulary: Callable[[ClientT, ModelInfo], Awaitable[Coverage | None]] | None = None
    """Lets a draft with another tokenizer than the target's map its vocabulary; None for one that need not. Raises
    TandemError when it cannot."""
    outdated: Callable[[ModelInfo], str] = lambda _: ""
    """Reason why a replica with these weights gets no new sequences, although it has joined; empty when it does."""

    def __post_init__(self) -> None:
        self.members: dict[str, Member[ClientT]] = {}
        """Every replica that was found, by address."""
        self._unresolved: dict[Address, str] = {}
        self.drained: set[str] = set()
        """Addresses that operators drained. A drain lasts until somebody resumes it, even while its name omits it."""
        self.prefixes = Prefixes()
        self.trial = asyncio.Lock()
        """Held by a request that may have killed replicas, while it is tried on another."""
        self._changed = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the replicas, and begin to follow them. This waits only for the first resolution of names."""
        await self.look()
        if any(address.is_name for address in self.addresses):
            self._refreshing = asyncio.create_task(self._keep_refreshing())

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self.members.values()))

    def find_free_number(self) -> int:
        """The lowest number that no member has."""
        taken = {member.number for member in self.members.values()}
        return next(number for number in count() if number not in taken)

    def drain(self, address: str) -> None:
        """Send no new sequences to this address until it is resumed, even if another replica takes it over.

        The sequences there move to another replica, or stay until they end.
        """
        member = self._member_at(address)
        self.drained.add(address)
        member.notify_change()

    def resume(self, address: str) -> None:
        """Send new sequences to this address again, if its name still includes it."""
        member = self._member_at(address)
        self.drained.discard(address)
        member.notify_change()

    def _member_at(self, address: str) -> Member[ClientT]:
        if address not in self.members:
            known = ", ".join(self.members) or "none"
            raise InvalidRequestError(
                f"there is no {self.role.value} replica {address!r}; there are: {known}"
            )
        return self.members[address]

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Every replica, and every name without an address."""
        unresolved = [
            ReplicaSnapshot(
                self.role, str(address), ReplicaState.DOWN, why, 0.0, 0, None, None, SpeculationStats(), None
            )
            for address, why in self._unresolved.items()
        ]
        return [member.snapshot() for member in self.members.values()] + unresolved

    def choose(
        self, avoid: Collection[Member[ClientT]] = (), fingerprint: str = ""
    ) -> Member[ClientT] | None:
        """The least busy ready replica that is not to be avoided; None without one. `fingerprint` is that of the
        weights that have begun the sequence, if any have."""
        ready = [
            member
            for member in self.members.values()
            if member not in avoid and (member.continues(fingerprint) if fingerprint else member.is_ready)
        ]
        return min(ready, key=lambda member: (member.open_sequences, member.step.value or 0.0), default=None)

    def has_other(self, avoid: Collection[Member[ClientT]]) -> bool:
        """True if a replica that is not to be avoided is ready, or will be once it has answered a probe."""
        others = (member for member in self.members.values() if member not in avoid)
        return any(member.is_ready or member.is_doubted for member in others)

    async def wait_for_ready(
        self, seconds: float, avoid: Collection[Member[ClientT]] = (), fingerprint: str = ""
    ) -> Member[ClientT] | None:
        """Wait for a ready replica and choose it; None when there is none in time, or none with the weights."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (member := self.choose(avoid, fingerprint)) is None and self.has_weights(fingerprint):
                    await self.change()
                return member
        return None

    def has_weights(self, fingerprint: str) -> bool:
        """True if a replica, ready or not, may go on with what weights of this fingerprint have begun."""
        return any(member.may_continue(fingerprint) for member in self.members.values())

    async def change(self) -> None:
        await self._changed.wait()

    def reasons(self) -> str:
        lines = [f"{shot.address} is {shot.state.value} ({shot.reason})" for shot in self.snapshots()]
        return "; ".join(lines) or "none is configured"

    def notify_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self.resolve_interval_seconds)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - the next resolution may do better
                log_fault(logger, "addresses cannot be followed", error, role=self.role.value)

    async def look(self) -> None:
        """Resolve each name; follow new addresses, send no new sequences to missing ones, and drop those that are still
        missing at the next resolution and have no sequences left."""
        wanted: dict[str, Address] = {}
        for address in self.addresses:
            for found in await self._resolve(address):
                wanted.setdefault(found, address)
        for found, address in wanted.items():
            if found not in self.members:
                self.members[found] = Member(found, address, self)
        for found, member in [*self.members.items()]:
            was_missed = member.is_missed
            member.is_missed = found not in wanted
            if member.is_missed is not was_missed:
                if found not in self.drained:
                    member.notify_change()
            elif was_missed and member.open_sequences == 0:
                del self.members[found]
                await member.close()
                logger.info("replica dropped", extra={"role": self.role.value, "address": found})

    async def _resolve(self, address: Address) -> list[str]:
        if not address.is_name:
            return [str(address)]
        try:
            hosts = await self.resolver(address.host, address.port)
        except OSError as error:
            # The known addresses may still work: a failing name server ends nothing.
            kept = [found for found, member in self.members.items() if member.origin == address]
            if not kept:
                self._unresolved[address] = f"its name cannot be resolved: {error.strerror or error}"
            return kept
        self._unresolved.pop(address, None)
        return [join_address(host, address.port) for host in hosts]


# ---- what drafts have read

_MAX_PREFIXES = 4096
"""Beginnings that are remembered, the latest: some hundred bytes each."""


class Prefixes:
    """Which draft has read which beginning of a text: a new sequence of its scope that continues it is read there at
    once."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, str] = OrderedDict()

    def add(self, address: str, scope: str, token_ids: Sequence[int]) -> None:
        for _, key in _beginnings(scope, token_ids):
            self._holders[key] = address
            self._holders.move_to_end(key)
        while len(self._holders) > _MAX_PREFIXES:
            self._holders.popitem(last=False)

    def held(self, scope: str, token_ids: Sequence[int]) -> dict[str, int]:
        """How many of the first tokens each address is known to have read for this scope."""
        found = {}
        for length, key in _beginnings(scope, token_ids):
            if (address := self._holders.get(key)) is not None:
                found[address] = length
        return found


def _beginnings(scope: str, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths of beginnings, the shortest first, each with its hash and the scope's."""
    # Tokens of a beginning that is remembered, which a draft reads in a step; each longer one has twice as many
    length = 64
    while length <= len(token_ids):
        yield length, hash((scope, *token_ids[:length]))
        length *= 2
