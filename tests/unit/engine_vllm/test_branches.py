"""Branches over vLLM are sequences that share their trunk's blocks: each continuation is what would be proposed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draft_service.proposers.drafting import propose_where_logits_are
from draft_service.proposers.standalone import StandaloneProposer
from tandem.engine.core.engine import Engine
from tandem.engine.interface import EngineSettings
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine_vllm.engine import VllmModel
from tandem.types import Delta, DraftOptions, Proposal, ProposeStep
from tests.paths import DEMO_DRAFT
from tests.unit.draft_service.test_ahead import (
    BUDGET,
    GREEDY,
    STRICT,
    SUPPORT,
    K,
    Round,
    assert_as_if_asked,
    proposed,
    pushed,
)
from tests.unit.engine.greedy import settle
from tests.unit.engine_vllm.fake_vllm import FakeWorker, expected_logits, fake_core


async def drafted_rounds(
    proposer: StandaloneProposer, options: DraftOptions, text: tuple[int, ...]
) -> AsyncIterator[tuple[tuple[int, ...], Proposal, Round]]:
    """Rounds of hits, on the likeliest outcome and on others, and of misses: texts, what was proposed after them, and
    what was drafted after that."""
    async with proposer.sequence(options) as sequence:
        for number in range(5):
            answer = await proposed(sequence, ProposeStep(Delta(0, text), K, BUDGET))
            drafted = await pushed(sequence)
            yield text, answer, drafted
            accepted, token_id = drafted.outcomes[number] if number % 2 else (1, 7)
            text = (*text, *answer.token_ids[:accepted], token_id)


@asynccontextmanager
async def proposing(block_count: int) -> AsyncIterator[StandaloneProposer]:
    model = VllmModel(fake_core(FakeWorker(), block_count), open_checkpoint(Path(DEMO_DRAFT)))
    engine = Engine(model, propose_where_logits_are, EngineSettings(max_sequences=12))
    engine.start()
    try:
        async with asyncio.timeout(60):
            yield StandaloneProposer(engine, 8)
            await settle(engine)
        assert engine.usage.reserved_tokens == 0
    finally:
        await engine.close()


@pytest.mark.parametrize("options", [GREEDY, STRICT, SUPPORT], ids=["greedy", "strict", "support"])
async def test_each_continuation_is_what_would_be_proposed(options: DraftOptions) -> None:
    async with proposing(400) as proposer:
        for first in range(3):
            prompt = tuple(range(first, first + 9 + first))
            async for text, answer, drafted in drafted_rounds(proposer, options, prompt):
                assert len(drafted.outcomes) == BUDGET.branch_count
                await assert_as_if_asked(proposer, options, (*text, *answer.token_ids), drafted)


async def test_branches_take_no_room_from_those_who_wait() -> None:
    """Sequences that need all of the memory together, each with a budget for branches."""

    async def rounds(proposer: StandaloneProposer, first: int) -> None:
        text = tuple(range(first, first + 20))
        async with proposer.sequence(GREEDY) as sequence:
            for _ in range(6):
                answer = await proposed(sequence, ProposeStep(Delta(0, text), K, BUDGET))
                assert answer.token_ids == tuple(
                    int(expected_logits([*text, *answer.token_ids[:i]]).argmax()) for i in range(K)
                )
                text = (*text, *answer.token_ids[:2], 7)

    async with proposing(40) as proposer:
        await asyncio.gather(*(rounds(proposer, first) for first in range(6)))
