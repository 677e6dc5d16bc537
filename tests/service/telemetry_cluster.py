"""Scripted models behind the real servicers of all three services, with telemetry on and every span in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from coordinator.telemetry.setup import CoordinatorTelemetry
from draft_service.servicer import DraftServicer
from tandem.telemetry.process import Telemetry
from tandem.telemetry.service import ObservedService
from tandem.telemetry.settings import TelemetryOptions
from tandem.types import (
    DraftedOutcomes,
    GenerationRequest,
    ModelInfo,
    Proposal,
    ProposeStep,
    Verification,
    VerifyStep,
)
from tandem.v1 import generation_pb2_grpc
from tandem.wire.generation import chunk_from_proto, request_to_proto
from target_service.servicer import TargetServicer
from tests.paths import DEMO_TARGET
from tests.service.fakes import FakeDraft, FakeTarget, serving


class MemoryExports:
    """Keeps spans instead of sending them."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.memory = InMemorySpanExporter()
        root = ALWAYS_ON if sample_ratio == 1.0 else TraceIdRatioBased(sample_ratio)
        provider = TracerProvider(sampler=ParentBased(root), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = provider.get_tracer("tests")

    def start(self) -> None:
        pass

    def close(self, deadline: float) -> None:
        pass


class Scripted:
    """A verifier or a proposer that answers what a fake answers, and a sequence of it."""

    pushed = None
    overdue_seconds = 0.0
    tokenizer_files = (DEMO_TARGET / "tokenizer.json",)

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._tokens: list[int] = []
        self.model_info: ModelInfo = fake.model_info

    @asynccontextmanager
    async def sequence(self, *_: object) -> AsyncIterator[Scripted]:
        yield Scripted(self._fake)

    async def propose(self, step: ProposeStep) -> Proposal:
        self._fake.apply(self._tokens, step.delta)
        proposal: Proposal = self._fake.proposal(self._tokens, step.token_count)
        return proposal

    def confirms(self, step: VerifyStep) -> bool:
        """No: it never goes on by itself."""
        return False

    async def verify(self, step: VerifyStep) -> Verification:
        self._fake.apply(self._tokens, step.delta)
        verification: Verification = await self._fake.verified(self._tokens, step)
        return verification

    def expect(self, drafted: DraftedOutcomes) -> None:
        """Ignore it, likewise."""

    def keep(self, token_count: int) -> None:
        """Forget it: nothing is written down at the end."""


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    """A cluster with its metrics and spans."""

    address: str
    coordinator: CollectorRegistry
    draft: CollectorRegistry
    target: CollectorRegistry
    memory: InMemorySpanExporter

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.memory.get_finished_spans()

    async def complete(self, request: GenerationRequest, traceparent: str = "") -> list[int]:
        """Complete the request in this trace context, and return the tokens."""
        metadata = (("traceparent", traceparent),) if traceparent else ()
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(request_to_proto(request), metadata=metadata)
            return [token async for chunk in call for token in chunk_from_proto(chunk).token_ids]


@asynccontextmanager
async def observed_cluster(
    target: FakeTarget,
    draft: FakeDraft,
    *,
    sample_ratio: float = 1.0,
    trace_rounds: float = 0.0,
    num_speculative_tokens: int = 2,
    draft_ahead: DraftAhead = "off",
    measure_waits: bool = False,
) -> AsyncIterator[ObservedCluster]:
    """Run a coordinator, a target and a draft in this process, each with telemetry."""
    exports = MemoryExports(sample_ratio)
    options = TelemetryOptions()
    async with AsyncExitStack() as stack:
        target_observer = ObservedService(Telemetry(options, "target", exports), "target")
        verifying = TargetServicer(target_observer)
        verifying.verifier = Scripted(target)  # type: ignore[assignment]
        target_observer.ready(target.model_info.name, lambda: None)
        draft_observer = ObservedService(Telemetry(options, "draft", exports), "draft")
        drafting = DraftServicer(draft_observer)
        draft.model_info = replace(draft.model_info, drafts_ahead=True)
        drafting.proposer = Scripted(draft)  # type: ignore[assignment]
        draft_observer.ready(draft.model_info.name, lambda: None)
        target_address, _ = await stack.enter_async_context(serving(verifying))
        draft_address, _ = await stack.enter_async_context(serving(drafting))
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=30.0,
            speculation_policy="fixed",
            num_speculative_tokens=num_speculative_tokens,
            draft_ahead=draft_ahead,
            trace_rounds=trace_rounds,
            measure_waits=measure_waits,
        )
        telemetry = Telemetry(settings, "coordinator", exports)
        service = CoordinatorService(settings, CoordinatorTelemetry(settings, telemetry))
        await service.start()
        stack.push_async_callback(service.close)
        address, _ = await stack.enter_async_context(serving(service.register))
        yield ObservedCluster(
            address,
            telemetry.registry,
            draft_observer.telemetry.registry,
            target_observer.telemetry.registry,
            exports.memory,
        )
