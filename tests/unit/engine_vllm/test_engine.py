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
from tandem.engine_vllm.engine import ROLLED_BACK, VllmModel
from tandem.engine_vllm.step import Step
from tandem.errors import ConfigurationError, TandemError
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
    STATE_SLOTS,
    VOCABULARY_SIZE,
    FakeRecurrentWorker,
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


@pytest.mark.parametrize("block_count", [200, 40])
async def test_recurrent_layers_go_on_from_the_state_of_the_same_tokens(
    block_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rollbacks, proposals longer than there are states for, and with too little memory."""
    monkeypatch.setitem(ROLLED_BACK, "cpu", ROLLED_BACK["cuda"])
    async with running(FakeRecurrentWorker(), block_count) as engine:
        await asyncio.gather(*(wander(engine, seed) for seed in range(12)))
        await settle(engine)
        assert engine.usage.reserved_tokens == engine.usage.retained_tokens == 0


async def test_a_rejection_in_recurrent_layers_computes_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ROLLED_BACK, "cpu", ROLLED_BACK["cuda"])
    computed: list[int] = []
    worker = FakeRecurrentWorker(lambda step: computed.extend(part.end - part.start for part in step.parts))
    async with running(worker) as engine:
        sequence = await engine.open(_MAX_LENGTH, scope="a scope")
        text = list(range(14))
        base = 0
        expected = [12, 2]  # a prompt in parts
        for length in range(STATE_SLOTS):
            for accepted in range(length + 1):
                rows = length + 1 if base else 1
                assert await ask(engine, sequence, base, text, rows) == greedy(text, rows)
                base = len(text) - length + accepted if base else len(text)
                following = min(length + (accepted == length), STATE_SLOTS - 1)
                text = [*text[:base], *range(20, 21 + following)]
                expected.append(1 + following)
        engine.release(sequence)
    assert computed == expected[:-1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU": ({}, "kernels for this device do not roll them back"),
    "a draft": ({"state_slots": lambda spec: 1}, "a draft of them would need a state behind each token"),
    "another kind": (
        {"recurrent_kinds": lambda spec: {"MAMBA1", "MAMBA2"}},
        "those of the kind MAMBA1 cannot be",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_recurrent_layers_that_do_not_roll_back_are_refused(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = REFUSED[why]
    if why != "a CPU":
        monkeypatch.setitem(ROLLED_BACK, "cpu", ROLLED_BACK["cuda"])
    core = fake_core(FakeRecurrentWorker())
    vars(core).update(changes)
    model = VllmModel(core, open_checkpoint(Path(DEMO_DRAFT)))
    with pytest.raises(ConfigurationError, match=f"has recurrent layers, and .*{sentence}"):
        model.allocate(EngineSettings(), _MAX_LENGTH)


def test_recurrent_layers_are_refused_with_the_newer_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLED_BACK, "cpu", ROLLED_BACK["cuda"])
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    model = VllmModel(fake_core(FakeRecurrentWorker()), open_checkpoint(Path(DEMO_DRAFT)))
    with pytest.raises(
        ConfigurationError, match="with VLLM_USE_V2_MODEL_RUNNER=1 they cannot be rolled back"
    ):
        model.allocate(EngineSettings(), _MAX_LENGTH)


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
