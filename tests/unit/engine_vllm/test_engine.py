"""Our scheduler over a vLLM without a model: what it says to the workers is what they have to know, of branches too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.drafting.proposal import propose_where_logits_are
from tandem.engine.core.engine import RowEngine
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine_vllm.engine import VllmModel
from tandem.engine_vllm.step import Step
from tandem.errors import TandemError
from tandem.model.types import (
    Delta,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    VerifyStep,
)
from tandem_draft.proposers.standalone import StandaloneProposer
from tests.paths import DEMO_DRAFT
from tests.unit.draft_service.test_ahead import (
    BUDGET,
    STRICT,
    SUPPORT,
    K,
    Round,
    assert_as_if_asked,
    proposed,
    proposing,
    pushed,
)
from tests.unit.draft_service.test_ahead import GREEDY as AHEAD_GREEDY
from tests.unit.engine.greedy import settle, started
from tests.unit.engine_vllm.fake_vllm import (
    BLOCK_TOKENS,
    VOCABULARY_SIZE,
    FakeWorker,
    expected_logits,
    fake_core,
    hashes,
)

GREEDY = TargetOptions("r", SamplingParams(temperature=0.0))
_MAX_LENGTH = 64


@asynccontextmanager
async def running(worker: FakeWorker, block_count: int = 200, **limits: Any) -> AsyncIterator[RowEngine]:
    core = fake_core(worker, block_count, _MAX_LENGTH)
    model = VllmModel(core, open_checkpoint(Path(DEMO_DRAFT)))
    settings = EngineSettings(**{"prefill_chunk_tokens": 12, "max_sequences": 32} | limits)
    async with started(RowEngine(model, settings)) as engine:
        yield engine


def greedy(token_ids: list[int], count: int) -> list[int]:
    return [int(expected_logits(token_ids[: len(token_ids) - i]).argmax()) for i in reversed(range(count))]


async def ask(engine: RowEngine, sequence: Sequence, base: int, text: list[int], rows: int) -> list[int]:
    step = VerifyStep(Delta(base, text[base:]), RowKind.TOKEN, rows)
    answer = await engine.run(sequence, RowRequest(step, GREEDY))
    return [row.token_id for row in answer.rows if isinstance(row, TokenRow)]


async def wander(engine: RowEngine, seed: int) -> None:
    """Extend, repeat and roll back a sequence at random; each answer must be that of its tokens alone."""
    draw = random.Random(seed)
    shared = [each % VOCABULARY_SIZE for each in range(3, 23)]
    sequence = await engine.open(_MAX_LENGTH, scope="a scope")
    text = shared[: draw.randrange(1, 20)]
    try:
        base = 0
        for _ in range(20):
            rows = min(draw.choice((1, 1, 3, 5)), len(text))
            assert await ask(engine, sequence, base, text, rows) == greedy(text, rows)
            kept = draw.choice(
                (len(text), len(text), max(len(text) - 3, 1), draw.randrange(1, len(text) + 1))
            )
            base = kept
            text = text[:kept] + [draw.randrange(VOCABULARY_SIZE) for _ in range(draw.randrange(1, 7))]
            if len(text) > _MAX_LENGTH:
                base = 0
                text = shared[:9]
    finally:
        engine.release(sequence)


@pytest.mark.parametrize("block_count", [200, 40, 18])
async def test_rows_depend_on_nothing_but_the_tokens(block_count: int) -> None:
    """Among others, with prefixes of others, after rollbacks, and when the memory is too small for all of them."""
    async with running(FakeWorker(), block_count) as engine:
        await asyncio.gather(*(wander(engine, seed) for seed in range(12)))
        await settle(engine)
        usage = engine.usage
        assert usage.reserved_tokens == 0 < usage.retained_tokens
        assert (usage.preemption_count > 0) == (block_count < 200)


async def test_a_prefix_is_not_computed_again_for_its_own_scope() -> None:
    computed: list[int] = []
    worker = FakeWorker(lambda step: computed.extend(part.end - part.start for part in step.parts))
    text = list(range(40))
    rest = 40 % BLOCK_TOKENS or BLOCK_TOKENS
    costs = []
    async with running(worker) as engine:
        for scope in ("first", "first", "second", "second", "first", "", ""):
            computed.clear()
            sequence = await engine.open(_MAX_LENGTH, scope=scope)
            assert await ask(engine, sequence, 0, text, 1) == greedy(text, 1)
            engine.release(sequence)
            await settle(engine)
            costs.append(sum(computed))
    assert costs == [40, rest, 40, rest, rest, 40, 40]


async def test_a_step_that_fails_fails_for_its_callers_alone() -> None:
    failing = [True]

    def spoil(step: Step) -> None:
        if failing[0]:
            raise RuntimeError("out of memory")

    async with running(FakeWorker(spoil)) as engine:
        sequence = await engine.open(_MAX_LENGTH, scope="a scope")
        with pytest.raises(TandemError, match="step failed"):
            await ask(engine, sequence, 0, [1, 2, 3], 1)
        failing[0] = False
        assert await ask(engine, sequence, 0, [1, 2, 3, 4], 2) == greedy([1, 2, 3, 4], 2)
        engine.release(sequence)


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
async def proposing_by(block_count: int) -> AsyncIterator[StandaloneProposer]:
    model = VllmModel(fake_core(FakeWorker(), block_count), open_checkpoint(Path(DEMO_DRAFT)))
    async with proposing(model, head=propose_where_logits_are, max_sequences=12) as proposer:
        yield proposer
        await settle(proposer._engine)


async def test_branches_take_over_the_hashes_of_their_trunk() -> None:
    """Each is of all tokens before its block, too: of a long text they would take milliseconds."""
    counts: list[int] = []

    def counted(request: Any) -> list[Any]:
        found = hashes(request)
        counts.append(len(found))
        return found

    core = fake_core(FakeWorker(), 400)
    core.engine.request_block_hasher = counted
    model = VllmModel(core, open_checkpoint(Path(DEMO_DRAFT)))
    async with proposing(model, head=propose_where_logits_are, max_sequences=12) as proposer:
        async for _ in drafted_rounds(proposer, AHEAD_GREEDY, tuple(range(40))):
            pass
        await settle(proposer._engine)
    # All blocks of the text where a sequence begins or begins anew; some sixty branches hash what lies behind them.
    assert len(counts) > 60
    assert sum(count > 2 for count in counts) < 10


@pytest.mark.parametrize("options", [AHEAD_GREEDY, STRICT, SUPPORT], ids=["greedy", "strict", "support"])
async def test_each_continuation_is_what_would_be_proposed(options: DraftOptions) -> None:
    async with proposing_by(400) as proposer:
        for first in range(3):
            prompt = tuple(range(first, first + 9 + first))
            async for text, answer, drafted in drafted_rounds(proposer, options, prompt):
                assert len(drafted.outcomes) == BUDGET.branch_count
                await assert_as_if_asked(proposer, options, (*text, *answer.token_ids), drafted)


async def test_branches_take_no_room_from_those_who_wait() -> None:
    """Sequences that need all of the memory together, each with a budget for branches."""

    async def rounds(proposer: StandaloneProposer, first: int) -> None:
        text = tuple(range(first, first + 20))
        async with proposer.sequence(AHEAD_GREEDY) as sequence:
            for _ in range(6):
                answer = await proposed(sequence, ProposeStep(Delta(0, text), K, BUDGET))
                assert answer.token_ids == tuple(
                    int(expected_logits([*text, *answer.token_ids[:i]]).argmax()) for i in range(K)
                )
                text = (*text, *answer.token_ids[:2], 7)

    async with proposing_by(40) as proposer:
        await asyncio.gather(*(rounds(proposer, first) for first in range(6)))
