"""Drafts on real gRPC for the stand-in of vLLM, and the plug-in between them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import grpc.aio
import pytest

from tandem.integrations.vllm import TandemProposer
from tandem.integrations.vllm.link import target_info
from tandem.integrations.vllm.proposer import StepDrafter
from tests.service import vllm_stub
from tests.service.fakes import FakeDraft, serving
from tests.service.vllm_stub import Runner

PATIENCE = 5.0
"""Seconds. Long, so that what comes too late has another cause than a busy machine."""

STEP_SECONDS = 0.01
"""Time that a step of the stand-in takes. A draft reads prompts meanwhile."""


def hashed(tokens: Sequence[int]) -> int:
    """Return a next token that depends on every token before it: proposals for other tokens are never right."""
    value = 7
    for token_id in tokens:
        value = (value * 1_000_003 + token_id + 1) % 2_147_483_647
    return value % 2048


DraftT = TypeVar("DraftT", bound=FakeDraft)


def fitting(draft: DraftT) -> DraftT:
    """Give a fake draft the tokenizer of the stand-in's model."""
    info = target_info(vllm_stub.config().model_config, 1)
    draft.model_info = replace(draft.model_info, tokenizer_hash=info.tokenizer_hash)
    return draft


@asynccontextmanager
async def served(
    *drafts: FakeDraft, auth_token: str | None = None
) -> AsyncIterator[list[tuple[str, grpc.aio.Server]]]:
    """Serve the drafts: the address and the server of each."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(draft, auth_token=auth_token)) for draft in drafts]


@asynccontextmanager
async def plugged(
    *addresses: str, patience: float = PATIENCE, ahead: str = "off", **options: str
) -> AsyncIterator[TandemProposer]:
    """A proposer as vLLM makes it, connected to these drafts."""
    variables = {
        "DRAFT_ADDRESS": ",".join(addresses),
        "DRAFT_AHEAD": ahead,
        "DRAFT_PATIENCE_SECONDS": str(patience),
        **options,
    }
    loggers = [logging.getLogger(name) for name in ("tandem", "coordinator")]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    with pytest.MonkeyPatch.context() as patch:
        vllm_stub.install(patch)
        for name, value in variables.items():
            patch.setenv(f"TANDEM_VLLM_{name}", value)
        proposer = TandemProposer(vllm_stub.config())
        proposer.attach(vllm_stub.ModelRunner(Runner(hashed)))
        await asyncio.to_thread(proposer.load_model, None)
        try:
            yield proposer
        finally:
            await asyncio.to_thread(steps_of(proposer).close)
            for each, (level, propagate, handlers) in zip(loggers, before, strict=True):
                each.setLevel(level)
                each.propagate, each.handlers = propagate, handlers


def steps_of(proposer: TandemProposer) -> StepDrafter:
    assert proposer.drafts.steps is not None
    return proposer.drafts.steps


async def run(
    proposer: TandemProposer, runner: Runner, steps: int, disturbed: Callable[[], None] = lambda: None
) -> None:
    """Make steps on a thread, as vLLM's blocks, while this loop serves the drafts."""
    proposer.attach(vllm_stub.ModelRunner(runner))
    for _ in range(steps):
        disturbed()
        await asyncio.to_thread(runner.step, proposer)
        await asyncio.sleep(STEP_SECONDS)


def disturbance(runner: Runner, seed: int) -> Callable[[], None]:
    chance = random.Random(seed)
    return lambda: runner.disturb(chance)
