"""Fake services without a model on real gRPC servers, and a real coordinator in front of them.

The target counts: n + 1 follows n. The draft counts along, unless a test gives it another rule.
"""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import SecretStr

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.servicer import DraftServicer
from tandem.client import Client
from tandem.errors import (
    CapacityError,
    InvalidRequestError,
    ServiceUnavailableError,
    TandemError,
    status_code,
)
from tandem.serving.interceptors import Context, RunningCalls
from tandem.serving.server import new_server
from tandem.serving.streams import MultiplexedStreams
from tandem.settings import ServerSettings
from tandem.types import (
    Delta,
    ModelFeature,
    ModelInfo,
    Proposal,
    RowKind,
    SparseDistribution,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tandem.wire.common import model_info_to_proto
from target_service.servicer import TargetServicer
from tests.paths import DEMO_TARGET
from tests.service.fake_rows import VOCABULARY_SIZE, sure_row, sure_statistics

NextToken = Callable[[Sequence[int]], int]
"""The token that a fake model continues these tokens with."""

MAX_LENGTH = 64


def counting(tokens: Sequence[int]) -> int:
    """Return the number after the last token."""
    return tokens[-1] + 1


def scripted(script: Sequence[int], prompt_length: int) -> NextToken:
    """Produce the script's tokens one after the other, and then zeros."""
    return lambda tokens: [*script, *[0] * MAX_LENGTH][len(tokens) - prompt_length]


def refusal(code: grpc.StatusCode, sentence: str) -> TandemError:
    """Return the error that ends a sequence with this status, on a dedicated or a shared stream."""
    meanings = (CapacityError, InvalidRequestError, ServiceUnavailableError)
    errors = (meaning(sentence) for meaning in meanings)
    return next(error for error in errors if status_code(error) is code)


class Fake:
    """Base of both fakes: a model's description, and counts of streams."""

    def __init__(self, next_token: NextToken = counting, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.next_token = next_token
        self.model_info = ModelInfo(
            "fake",
            "Fake",
            VOCABULARY_SIZE,
            "hash",
            MAX_LENGTH,
            "none",
            eos_token_ids,
            features=frozenset(ModelFeature),
        )
        self.shared = MultiplexedStreams()
        self.opened = 0
        self.finished = 0
        self.running = 0
        self.longest = 0
        """Maximum number of tokens of a sequence so far."""

    def open(self, max_length: int) -> None:
        """Begin a sequence, which must not be longer than the model can read."""
        assert max_length <= MAX_LENGTH
        self.opened += 1

    def apply(self, tokens: list[int], delta: Delta) -> None:
        """Apply the delta to the tokens; it must not leave a gap."""
        assert delta.base_length <= len(tokens)
        tokens[delta.base_length :] = delta.token_ids
        self.longest = max(self.longest, len(tokens))


class FakeTarget(Fake, TargetServicer):
    """A target whose distributions are one-hot, at any temperature."""

    step_seconds = 0.0
    """Duration of a step."""

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        tokens: list[int] = []
        self.running += 1
        try:
            async for request in request_iterator:
                if request.HasField("open"):
                    self.open(request.open.max_length)
                elif request.HasField("finish"):
                    self.finished += 1
                    return
                else:
                    step = target_wire.step_from_proto(request.step)
                    self.apply(tokens, step.delta)
                    await asyncio.sleep(self.step_seconds)
                    yield target_wire.verification_to_proto(self.verification(tokens, step))
        finally:
            self.running -= 1

    def verification(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        """Return a row for each of the last positions."""
        first = len(tokens) - step.row_count + 1
        assert all(0 <= token_id < VOCABULARY_SIZE for token_id in (*tokens, *chain(*step.supports)))
        continuation = [self.next_token(tokens[:length]) for length in range(first, len(tokens) + 1)]
        if step.row_kind is RowKind.DENSE:
            return Verification(first, tuple(map(sure_row, continuation)))
        supports = [*step.supports, *[np.empty(0, np.int64)] * (step.row_count - len(step.supports))]
        rows: tuple[TargetRow, ...] = (
            tuple(map(TokenRow, continuation))
            if step.row_kind is RowKind.TOKEN
            else tuple(
                SupportRow(
                    support,
                    (support == token_id).astype(float),
                    outside_mass=float(token_id not in support),
                    outside_token_id=-1 if token_id in support else token_id,
                    statistics=sure_statistics(support, token_id) if step.with_statistics else None,
                    outside_prob=float(token_id not in support) if step.raced_recovery else None,
                )
                for token_id, support in zip(continuation, supports, strict=True)
            )
        )
        return Verification(first, rows)

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(model_info=model_info_to_proto(self.model_info))

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        path = DEMO_TARGET / "tokenizer.json"
        yield target_pb2.GetTokenizerResponse(file_name=path.name, content=path.read_bytes())


class FakeDraft(Fake, DraftServicer):
    """A draft with one-hot distributions. Tests override `respond` to make it misbehave."""

    def __init__(self, next_token: NextToken = counting) -> None:
        super().__init__(next_token)
        self.requested: list[int] = []
        """Number of tokens that each step requested."""

    async def respond(
        self, tokens: Sequence[int], count: int, context: Context
    ) -> draft_pb2.ProposeResponse | None:
        """Return the answer to a step; None ends the stream."""
        return self.proposal(tokens, count)

    def proposal(self, tokens: Sequence[int], count: int) -> draft_pb2.ProposeResponse:
        """Return the correct proposal."""
        continuation: list[int] = []
        for _ in range(count):
            continuation.append(self.next_token([*tokens, *continuation]))
        sure = [SparseDistribution(np.array([token_id]), np.ones(1)) for token_id in continuation]
        return draft_wire.proposal_to_proto(Proposal(len(tokens), tuple(continuation), tuple(sure)))

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        tokens: list[int] = []
        self.running += 1
        try:
            async for request in request_iterator:
                if request.HasField("open"):
                    self.open(request.open.max_length)
                elif request.HasField("finish"):
                    self.finished += 1
                    return
                else:
                    step = draft_wire.step_from_proto(request.step)
                    self.apply(tokens, step.delta)
                    self.requested.append(step.token_count)
                    response = await self.respond(tokens, step.token_count, context)
                    if response is None:
                        return
                    yield response
        finally:
            self.running -= 1

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=model_info_to_proto(self.model_info))


@asynccontextmanager
async def serving(
    register: Callable[[grpc.aio.Server], None],
    *interceptors: grpc.aio.ServerInterceptor,
    auth_token: str | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """Run a ready server with these servicers; yield its address and the server."""
    token = None if auth_token is None else SecretStr(auth_token)
    server = new_server(ServerSettings(auth_token=token), RunningCalls(), *interceptors)
    register(server)
    ready = health.aio.HealthServicer()
    await ready.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)


@asynccontextmanager
async def coordinator(settings: CoordinatorSettings) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """Run a coordinator with these settings; yield its address and the service."""
    service = CoordinatorService(settings)
    await service.start()
    try:
        async with serving(service.register, *service.interceptors) as (address, _):
            yield address, service
    finally:
        await service.close()


@asynccontextmanager
async def coordinating(settings: CoordinatorSettings) -> AsyncIterator[str]:
    """Run a coordinator with these settings; yield its address."""
    async with coordinator(settings) as (address, _):
        yield address


@asynccontextmanager
async def cluster(
    target: FakeTarget, draft: FakeDraft | None, patience_seconds: float = 30.0
) -> AsyncIterator[Client]:
    """A client of a coordinator over these fakes."""
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address = None
        if draft is not None:
            draft_address, _ = await stack.enter_async_context(
                serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
            )
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=patience_seconds,
            speculation_policy="fixed",
        )
        address = await stack.enter_async_context(coordinating(settings))
        yield await stack.enter_async_context(Client(address))
