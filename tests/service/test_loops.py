"""Every loop that reads, follows or probes outlives what nobody has foreseen: it says so in a line, and goes on."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.model.replica import ReplicaState
from tandem.model.types import GenerationRequest, RowKind
from tandem.serving.interceptors import Context
from tandem.serving.streams import ServedSequence
from tandem.v1 import target_pb2, types_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tandem_coordinator.replicas.pool import Member, Pool
from tandem_coordinator.replicas.registry import ReplicaRegistry
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_coordinator.transport.target_client import TargetClient
from tandem_target import servicer as target_servicer
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, FakeTarget, fleet

TOKENS = 30
EXPECTED = tuple(range(11, 11 + TOKENS))
REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2, seed=1)


class Throwing:
    """A function that fails at its first call, by an error that is none of ours."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._has_thrown = False

    def throw(self) -> None:
        if not self._has_thrown:
            self._has_thrown = True
            raise ZeroDivisionError("never foreseen")

    def function(self) -> Callable[..., Any]:
        def called(*values: Any, **named: Any) -> Any:
            self.throw()
            return self._function(*values, **named)

        async def awaited(*values: Any, **named: Any) -> Any:
            self.throw()
            return await self._function(*values, **named)

        return awaited if inspect.iscoroutinefunction(self._function) else called


Throw = Callable[[object, str], None]
"""Lets a method, of an object or of a class, throw once."""


def members(replicas: ReplicaRegistry) -> list[Member[Any]]:
    return [*replicas.targets.members.values(), *replicas.drafts.members.values()]


def in_streams(role: str, name: str) -> Callable[[ReplicaRegistry, Throw], None]:
    """Throw into what the streams to the first service of this role do."""

    def arm(replicas: ReplicaRegistry, throw: Throw) -> None:
        pool: Pool[Any] = replicas.targets if role == "target" else replicas.drafts
        throw(next(iter(pool.members.values())).client.streams, name)

    return arm


def in_following(owner: type, name: str) -> Callable[[ReplicaRegistry, Throw], None]:
    """Throw into how replicas are followed, and let them be met again."""

    def arm(replicas: ReplicaRegistry, throw: Throw) -> None:
        throw(owner, name)
        for member in members(replicas):
            member.doubt("a test does")

    return arm


def in_target(_: ReplicaRegistry, throw: Throw) -> None:
    throw(target_wire, "requests_from_proto")
    translation = target_servicer.TRANSLATION
    target_servicer.TRANSLATION = replace(translation, read=target_wire.requests_from_proto)


def in_refreshing(replicas: ReplicaRegistry, throw: Throw) -> None:
    throw(Pool, "look")
    replicas.targets.resolve_interval_seconds = 0.01
    replicas.targets._refreshing = asyncio.create_task(replicas.targets._keep_refreshing())


LOOPS: dict[str, tuple[Callable[[ReplicaRegistry, Throw], None], str]] = {
    "the coordinator reads a target's answers": (in_streams("target", "read"), "stream lost"),
    "the coordinator reads a draft's answers": (in_streams("draft", "read"), "stream lost"),
    "the coordinator writes to a target": (in_streams("target", "write"), "stream lost"),
    "the coordinator writes to a draft": (in_streams("draft", "write"), "stream lost"),
    "a target reads its requests": (in_target, "unexpected error"),
    "a draft reads its requests": (
        lambda _, throw: throw(draft_wire, "requests_from_proto"),
        "unexpected error",
    ),
    "a replica is connected to": (in_following(Member, "_connect"), "replica cannot be followed"),
    "a target says its model": (in_following(TargetClient, "model_info"), "replica cannot be followed"),
    "a draft says its model": (in_following(DraftClient, "model_info"), "replica cannot be followed"),
    "a target is probed": (in_following(TargetClient, "probe"), "replica cannot be followed"),
    "a replica's health is watched": (in_following(Member, "_watch"), "replica cannot be followed"),
    "a replica is pinged": (in_following(Member, "_ping"), "replica cannot be followed"),
    "names are resolved": (in_refreshing, "addresses cannot be followed"),
    "hangs are looked for": (
        lambda _, throw: throw(ReplicaRegistry, "_look_after_steps"),
        "hangs cannot be looked for",
    ),
}
"""How each is thrown into, and the line that says so."""


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_loop_goes_on_after_what_it_has_not_foreseen(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arm, event = LOOPS[loop]

    def throw(owner: object, name: str) -> None:
        monkeypatch.setattr(owner, name, Throwing(getattr(owner, name)).function())

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.message == event]

    monkeypatch.setattr(target_servicer, "TRANSLATION", target_servicer.TRANSLATION)  # as it is, in the end
    async with fleet(FakeTarget(), FakeTarget(), FakeDraft()) as (client, _, coordinator):
        arm(coordinator.replicas, throw)
        assert (await complete(client, REQUEST)).token_ids == EXPECTED
        await until(lambda: bool(lines()))
        shots = coordinator.replicas.snapshots
        await until(lambda: all(shot.state is ReplicaState.READY for shot in shots()))
        completed = await complete(client, REQUEST)
        assert completed.token_ids == EXPECTED
        assert completed.speculation.accepted > 0
    assert len(lines()) <= 2, "one for each replica of the role"


@pytest.mark.parametrize("fault", ["an error that is pushed", "an answer that cannot be sent"])
async def test_a_sequence_ends_with_an_error_of_its_pushes(fault: str) -> None:
    def say(_: object) -> None:
        raise ZeroDivisionError("never foreseen")

    async def room() -> None: ...

    sequence: ServedSequence[Any, Any, Any] = ServedSequence(None, say, room)
    pushed: asyncio.Queue[object] = asyncio.Queue()
    pushed.put_nowait(ZeroDivisionError() if fault == "an error that is pushed" else "an answer")
    with pytest.raises(ZeroDivisionError):
        await anext(sequence.steps(pushed))
    sequence.close()


ROWS = {
    "70 dimensions": [1] * 70,
    "a shape whose size wraps around": [2**16] * 4,
    "a shape whose size is beyond 64 bits": [2**31 - 1, 2**31 - 1],
    "rows without a column": [900_000, 0],
    "a negative dimension": [-1, 4],
}


class Misshapen(FakeTarget):
    """Answers with dense rows of an impossible shape."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self._shape = shape

    async def Verify(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        async for answer in super().Verify(request_iterator, context):
            for part in answer.parts:
                if part.HasField("verification"):
                    rows = part.verification.dense_rows
                    rows.data_type = types_pb2.DATA_TYPE_FLOAT32
                    rows.shape[:] = self._shape
                    rows.data = bytes(4 if self._shape == ROWS["70 dimensions"] else 0)
            yield answer


@pytest.mark.parametrize("shape", ROWS)
async def test_rows_of_an_impossible_shape_cost_only_the_target(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(Misshapen(ROWS[shape]), FakeTarget()) as (client, *_):
        for _ in range(2):
            assert (await complete(client, replace(REQUEST, row_kind=RowKind.DENSE))).token_ids == EXPECTED
    lost = [vars(record)["reason"] for record in caplog.records if record.message.startswith("target lost")]
    assert len(lost) == 1
    assert "dense_rows h" in lost[0]


async def test_a_model_that_cannot_be_decoded_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """One undecodable answer to GetModelInfo, and the replica is back with the next."""
    target = FakeTarget()
    async with fleet(target, FakeTarget()) as (client, services, coordinator):
        member = coordinator.replicas.targets.members[services[0].address]
        good = member.model
        assert good is not None
        stub: Any = member.client._stub
        undecodable = [b"\xff\xff\xff"]

        def decode(content: bytes) -> Any:
            content = undecodable.pop() if undecodable else content
            return target_pb2.TargetServiceGetModelInfoResponse.FromString(content)

        stub.GetModelInfo._response_deserializer = decode
        member.suspect("a test does")
        await until(lambda: not undecodable)
        await until(lambda: member.state is ReplicaState.READY)
        assert (await complete(client, REQUEST)).token_ids == EXPECTED
    assert [record.message for record in caplog.records].count("replica cannot be followed") == 1
