"""A draft or a target without a model: `python -m benchmarks.load.scripted_services --role target --step-ms 5`.

A step begins when the one before it has ended, and answers everything that came meanwhile, as an engine's does. The
answers to one stream's sequences go in one message. So what is left to measure is the coordinator.
"""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.load.script import Script
from benchmarks.load.scripted_numbers import peaked, support_row
from benchmarks.pairs import DEMO
from tandem.standard_streams import write_out
from tandem.types import (
    IntArray,
    ModelFeature,
    ModelInfo,
    Proposal,
    SparseDistribution,
    StepCost,
    TargetRow,
    TokenRow,
    Verification,
)
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tandem.v1.types_pb2 import RowKind, SequenceEnd, SequencePart
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tandem.wire.columns import ColumnPart
from tandem.wire.common import model_info_to_proto

VOCABULARY_SIZE = 2048
"""Of the demo pair, whose tokenizer the scripted target hands out."""
MAX_LENGTH = 65_536
SUPPORT_SIZE = 24
"""Ids of a draft's distribution, about as many as hold 0.98 of the demo draft's mass at temperature 1."""

_MODEL = ModelInfo(
    "scripted", "Scripted", VOCABULARY_SIZE, "scripted", MAX_LENGTH, "none", features=frozenset(ModelFeature)
)


_NO_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_Part = SequencePart | ColumnPart[Any]


@dataclass(slots=True, eq=False)
class _Stream:
    """One stream's sequences and the answers that wait to be sent."""

    answers: asyncio.Queue[list[_Part]] = field(default_factory=asyncio.Queue)
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of each sequence."""
    ready: list[_Part] = field(default_factory=list)


class _Steps:
    """Steps of a model that is not there."""

    def __init__(self, seconds: float, answer: Callable[[int, Any, int, int], Any]) -> None:
        self._seconds = seconds
        self._answer = answer
        self._waiting: list[tuple[_Stream, int, int, Any]] = []
        self._more = asyncio.Event()

    def put(self, stream: _Stream, number: int, length: int, step: Any) -> None:
        """Queue a sequence's step."""
        self._waiting.append((stream, number, length, step))
        self._more.set()

    async def run(self) -> None:
        """Run one step after the other."""
        loop = asyncio.get_running_loop()
        while await self._more.wait():
            self._more.clear()
            taken, self._waiting = self._waiting, []
            ends = loop.time() + self._seconds
            streams = {id(stream): stream for stream, *_ in taken}
            tokens = sum(len(step.delta.token_ids) for *_, step in taken)
            for stream, number, length, step in taken:
                stream.ready.append(_part(number, self._answer(length, step, len(taken), tokens)))
            await asyncio.sleep(max(ends - loop.time(), 0.0))
            for stream in streams.values():
                stream.answers.put_nowait(stream.ready)
                stream.ready = []


def _part(number: int, answer: Any) -> _Part:
    if answer.HasField("columns"):
        return ColumnPart(number, answer, answer.ByteSize())
    return SequencePart(sequence=number, message=answer.SerializeToString())


class _Scripted:
    """The part that both roles share: sequences are lengths, and a stream's answers leave in one message."""

    with_columns = False
    """True once a sequence has opened that takes columns."""

    def __init__(self, script: Script, step_seconds: float, *, knows_columns: bool = True) -> None:
        self._knows_columns = knows_columns
        self._script = script
        self._step_seconds = step_seconds
        self.steps = _Steps(step_seconds, self.answer)

    def answer(self, length: int, step: Any, sequences: int, tokens: int) -> Any:
        """The answer to a step of a sequence that then has `length` tokens."""
        raise NotImplementedError

    def cost(self, sequences: int, tokens: int) -> StepCost:
        """Cost of a step, as real services report it."""
        return StepCost(self._step_seconds, sequences, tokens)

    def take(self, stream: _Stream, number: int, request: Any) -> None:
        """A message of one sequence."""
        if request.HasField("open"):
            self.with_columns = self._knows_columns and request.open.takes_columns
        elif request.HasField("step"):
            delta = request.step.delta
            length = stream.lengths[number] = delta.base_length + len(delta.token_ids)
            self.steps.put(stream, number, length, request.step)
        elif request.HasField("finish"):
            stream.lengths.pop(number, None)
            stream.answers.put_nowait([SequencePart(sequence=number, end=SequenceEnd())])

    async def one(self, requests: AsyncIterator[Any], read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """The answers of a stream with one sequence."""
        stream = _Stream()
        async for request in requests:
            if request.HasField("finish"):
                return
            self.take(stream, 1, request)
            if request.HasField("step"):
                for part in await stream.answers.get():
                    yield part.answer if isinstance(part, ColumnPart) else read(part.message)

    async def many(
        self, requests: AsyncIterator[Any], read: Callable[[bytes], Any]
    ) -> AsyncIterator[list[_Part]]:
        """The answers of a stream with many sequences."""
        stream = _Stream()
        reading = asyncio.create_task(self._read(stream, requests, read))
        try:
            while True:
                yield await stream.answers.get()
        finally:
            reading.cancel()

    async def _read(
        self, stream: _Stream, requests: AsyncIterator[Any], read: Callable[[bytes], Any]
    ) -> None:
        async for request in requests:
            for part in request.parts:
                if part.WhichOneof("part") == "message":
                    self.take(stream, part.sequence, read(part.message))


class ScriptedTarget(_Scripted, target_pb2_grpc.TargetServiceServicer):
    """Says the script."""

    def answer(self, length: int, step: Any, sequences: int, tokens: int) -> Any:
        """See `_Scripted`."""
        first = length - step.row_count + 1
        said = [self._script.target_token(position) for position in range(first, length + 1)]
        rows: list[TargetRow] = [TokenRow(token_id) for token_id in said]
        if step.row_kind == RowKind.ROW_KIND_SUPPORT:
            supports = [np.array(support.token_ids, np.int64) for support in step.supports]
            supports += [_NO_SUPPORT] * (len(said) - len(supports))
            rows = [
                support_row(token_id, support, is_raced=step.raced_recovery)
                for token_id, support in zip(said, supports, strict=True)
            ]
        verification = Verification(first, tuple(rows), self.cost(sequences, tokens))
        return target_wire.verification_to_proto(verification, with_columns=self.with_columns)

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One sequence."""
        async for answer in self.one(request_iterator, target_pb2.VerifyResponse.FromString):
            yield answer

    async def VerifyMany(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Many sequences."""
        async for parts in self.many(request_iterator, target_pb2.VerifyRequest.FromString):
            yield target_wire.many_to_proto(parts)

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        """The model that is not there."""
        return target_pb2.TargetServiceGetModelInfoResponse(model_info=model_info_to_proto(_MODEL))

    async def GetTokenizer(
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        """The demo pair's."""
        path = DEMO / "target" / "tokenizer.json"
        yield target_pb2.GetTokenizerResponse(file_name=path.name, content=path.read_bytes())


class ScriptedDraft(_Scripted, draft_pb2_grpc.DraftServiceServicer):
    """Guesses at the script."""

    def answer(self, length: int, step: Any, sequences: int, tokens: int) -> Any:
        """See `_Scripted`."""
        positions = range(length, length + step.token_count)
        proposal = Proposal(
            length,
            tuple(self._script.draft_token(position) for position in positions),
            tuple(map(self._distribution, positions)) if self.with_distributions else (),
            cost=self.cost(sequences, tokens),
        )
        return draft_wire.proposal_to_proto(proposal, with_columns=self.with_columns)

    def _distribution(self, position: int) -> SparseDistribution:
        ids = self._script.support(position, SUPPORT_SIZE)
        return SparseDistribution(np.array(ids, np.int64), _PROBABILITIES)

    with_distributions = False
    """True if the rule needs what each token was drawn from."""

    async def Propose(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One sequence."""
        async for answer in self.one(request_iterator, draft_pb2.ProposeResponse.FromString):
            yield answer

    async def ProposeMany(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Many sequences."""
        async for parts in self.many(request_iterator, draft_pb2.ProposeRequest.FromString):
            yield draft_wire.many_to_proto(parts)

    def take(self, stream: _Stream, number: int, request: Any) -> None:
        """See `_Scripted`."""
        if request.HasField("open"):
            self.with_distributions = request.open.row_kind == RowKind.ROW_KIND_SUPPORT
        super().take(stream, number, request)

    async def GetModelInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """The model that is not there."""
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=model_info_to_proto(_MODEL))


_PROBABILITIES = peaked(SUPPORT_SIZE)


async def _serve(role: str, script: Script, step_seconds: float, *, knows_columns: bool) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    scripted: _Scripted
    if role == "target":
        scripted = target = ScriptedTarget(script, step_seconds, knows_columns=knows_columns)
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    else:
        scripted = draft = ScriptedDraft(script, step_seconds, knows_columns=knows_columns)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    ready = health.aio.HealthServicer()
    await ready.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_out(f"ready on 127.0.0.1:{port}\n")
    await scripted.steps.run()


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--role", choices=("target", "draft"), required=True)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--acceptance", type=float, default=0.72)
    parser.add_argument("--without-columns", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    script = Script(VOCABULARY_SIZE, options.acceptance)
    knows_columns = not options.without_columns
    uvloop.run(_serve(options.role, script, options.step_ms / 1000.0, knows_columns=knows_columns))


if __name__ == "__main__":
    main(sys.argv[1:])
