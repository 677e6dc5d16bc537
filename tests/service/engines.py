"""Services with a real engine and a tiny model, with scripted faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tandem.clients.client import Client
from tandem.drafting.proposal import propose_head
from tandem.engine.core.engine import Engine, RowEngine
from tandem.engine.core.jobs import StepRecord
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineSettings
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.model.grammar import Grammars
from tandem.model.types import Verification, VerifyStep
from tandem_coordinator.service import CoordinatorService
from tandem_coordinator.transport.target_client import PROBE
from tandem_draft.proposers import Proposer
from tandem_draft.proposers.mapping import Vocabularies
from tandem_draft.proposers.standalone import StandaloneProposer
from tandem_draft.servicer import DraftServicer
from tandem_draft.settings import DraftSettings
from tandem_load.fakes import LeaveError
from tandem_target.servicer import Said, TargetServicer, VerifiedFor
from tandem_target.verifier import Verifier
from tests.end_to_end.models import random_model, save_model
from tests.paths import DEMO_TARGET, DEVICE
from tests.service.fakes import HANG_SECONDS, coordinated, hooked, refusal, serving
from tests.unit.engine.greedy import started

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
"""Shape of a tiny model."""

Fault = Callable[[Verification], Verification]
"""Corrupts an answer."""


def tiny_model(folder: Path, seed: int = 1) -> LoadedModel:
    """One layer of random weights, with the demo pair's tokenizer."""
    weights = random_model(seed, **TINY)
    return load_model(save_model(weights, folder), device=DEVICE, dtype="float32", threads=1)


@dataclass
class Faults:
    """The faults of a service by step, counted from 1 over all its streams."""

    before: set[int] = field(default_factory=set)
    """Steps at which the stream breaks before the computation."""
    after: set[int] = field(default_factory=set)
    """Steps at which the stream breaks after the computation, before the answer is sent."""
    leaving: set[int] = field(default_factory=set)
    """Steps at which the stream ends without an error."""
    garbled: dict[int, Fault] = field(default_factory=dict)
    """Steps whose answer is corrupted."""
    full: bool = False
    """True if there is no room for a new sequence."""
    refused: int = 0
    """Sequences for which there was none."""
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    steps: int = 0
    answers: int = 0
    """With those of steps that the target takes by itself."""
    proposals: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """The tokens that were to be verified, each behind its base length."""
    opened: int = 0
    running: int = 0


class FaultyTarget(TargetServicer):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        faults = self.faults
        if sequence.options.request_id == PROBE:
            await super().serve_sequence(sequence)  # a target that erred works again
            return
        if faults.full:
            faults.refused += 1
            raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        def on_step(step: VerifyStep) -> None:
            faults.steps += 1
            count = step.row_count - 1
            proposed = step.delta.token_ids[len(step.delta.token_ids) - count :]
            faults.proposals.append((step.delta.length - count, tuple(proposed)))
            if faults.steps in faults.before:
                raise refusal(faults.code, "gone")

        def on_answer(answer: Said) -> Said:
            assert isinstance(answer, Verification), "what is pending is said by the stream"
            faults.answers += 1
            if faults.steps in faults.leaving:
                raise LeaveError
            if faults.steps in faults.after:
                raise refusal(faults.code, "gone")
            garble = faults.garbled.get(faults.steps)
            return garble(answer) if garble else answer

        faults.opened += 1
        faults.running += 1
        try:
            await super().serve_sequence(hooked(sequence, on_step, on_answer))
        except LeaveError:
            pass
        finally:
            faults.running -= 1


@asynccontextmanager
async def target(
    model: LoadedModel,
    faults: Faults,
    step_seconds: float = 0.0,
    max_sequences: int = 8,
    kept_sequences: int = 0,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    servicer: Callable[[Faults], FaultyTarget] = FaultyTarget,
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """A target service in this process: its address, and its server."""

    def observe(record: StepRecord) -> None:
        time.sleep(step_seconds)
        on_step(record)

    target = servicer(faults)
    limits = EngineSettings(max_sequences=max_sequences, kept_sequences=kept_sequences)
    async with started(RowEngine(Backends(model), limits, on_step=observe)) as verifying:
        target.verifier = Verifier(verifying, [DEMO_TARGET / "tokenizer.json"])
        async with serving(target) as served:
            yield served


@asynccontextmanager
async def draft(
    model: LoadedModel,
    servicer: DraftServicer | None = None,
    draft_top_k: int = 8,
    max_sequences: int = 8,
    kept_sequences: int = 0,
    tokenizer: Path | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """A draft service in this process, with this servicer or a plain one: its address, and its server.

    With the file of its tokenizer it drafts for targets with other tokenizers too.
    """
    servicer = servicer or DraftServicer()
    limits = EngineSettings(max_sequences=max_sequences, kept_sequences=kept_sequences)
    async with started(Engine(Backends(model), propose_head, limits, on_step)) as proposing:
        grammars = Grammars.of(DEMO_TARGET / "tokenizer.json", model.info)
        vocabularies = None if tokenizer is None else Vocabularies(tokenizer, model.info)
        servicer.proposer = StandaloneProposer(
            proposing, draft_top_k=draft_top_k, grammars=grammars, vocabularies=vocabularies
        )
        async with serving(servicer) as served:
            yield served


NewProposer = Callable[[DraftSettings], Proposer]


def model_free(new: NewProposer, servicer: DraftServicer | None = None, **options: Any) -> DraftServicer:
    """Let this servicer, or a plain one, draft without a model."""
    servicer = servicer or DraftServicer()
    servicer.proposer = new(DraftSettings(**options))
    return servicer


@asynccontextmanager
async def services(
    target_model: LoadedModel,
    drafting: LoadedModel | DraftServicer | None,
    *faults: Faults,
    step_seconds: float = 0.0,
    max_sequences: int = 8,
    **options: Any,
) -> AsyncIterator[tuple[str, str | None]]:
    """Addresses of a target for each set of faults (one without any, by default), and of a draft if there is one.

    The options are the draft's, if it has a model.
    """
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        targets = [
            (await enter(target(target_model, each, step_seconds, max_sequences)))[0]
            for each in faults or (Faults(),)
        ]
        address = None
        if isinstance(drafting, DraftServicer):
            address, _ = await enter(serving(drafting))
        elif drafting is not None:
            address, _ = await enter(draft(drafting, max_sequences=max_sequences, **options))
        yield ",".join(targets), address


@asynccontextmanager
async def pair(
    target_model: LoadedModel,
    drafting: LoadedModel | DraftServicer | None,
    *faults: Faults,
    max_sequences: int = 8,
    **options: Any,
) -> AsyncIterator[tuple[Client, CoordinatorService]]:
    """A client of a coordinator with these options over such services, and the coordinator.

    No draft is late on a busy machine, and no outcome is drafted ahead unless a test says so: rounds begin where they
    did in another run.
    """
    async with (
        asyncio.timeout(HANG_SECONDS),
        services(target_model, drafting, *faults, max_sequences=max_sequences) as addresses,
        coordinated(*addresses, **({"draft_ahead": "off"} | options)) as running,
    ):
        yield running


MakePair = Callable[..., AbstractAsyncContextManager[tuple[Client, CoordinatorService]]]
"""`pair` of certain models."""
