"""A draft's tokens are drawn in a row where its logits are: the same tokens by fewer calls, whatever stands beside."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.drafting.proposal import propose_where_logits_are
from tandem.engine.core.jobs import StepRecord
from tandem.engine.core.timing import StepTimes
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine_vllm.engine import VllmModel
from tandem.model.types import Delta, DraftOptions, Proposal, ProposeStep, RowKind, SamplingParams
from tandem_draft.proposers.standalone import StandaloneProposer
from tests.paths import DEMO_DRAFT
from tests.unit.draft_service.test_ahead import GREEDY, STRICT, SUPPORT, proposed, proposing
from tests.unit.engine.greedy import settle
from tests.unit.engine_vllm.fake_vllm import VOCABULARY_SIZE, FakeWorker, expected_logits, fake_core
from tests.unit.engine_vllm.test_engine import drafted_rounds

ROOM = 3
"""Tokens behind a step's for which there is room in any case."""
WAYS = {"greedy": GREEDY, "strict": STRICT, "support": SUPPORT}


@asynccontextmanager
async def proposer_over(worker: FakeWorker, block_count: int = 400) -> AsyncIterator[StandaloneProposer]:
    model = VllmModel(fake_core(worker, block_count, proposes=False), open_checkpoint(Path(DEMO_DRAFT)))
    model.lookahead = ROOM
    async with proposing(
        model, head=propose_where_logits_are, max_sequences=12, prefill_chunk_tokens=12
    ) as proposer:
        yield proposer
        await settle(proposer._engine)


async def wander(proposer: StandaloneProposer, options: DraftOptions, seed: int) -> list[Proposal]:
    """Rounds of random lengths, each behind what a target kept of the one before."""
    draw = random.Random(seed)
    text = [draw.randrange(VOCABULARY_SIZE) for _ in range(draw.randrange(1, 30))]
    found = []
    async with proposer.sequence(replace(options, request_id=str(seed))) as sequence:
        base = 0
        while len(text) < 50:
            count = draw.choice((1, 2, 4, 7))
            answer = await proposed(sequence, ProposeStep(Delta(base, tuple(text[base:])), count))
            assert len(answer) == count
            found.append(answer)
            base = len(text)
            text += [*answer.token_ids[: draw.randrange(count + 1)], draw.randrange(VOCABULARY_SIZE)]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_count", [400, 60], ids=["much memory", "little memory"])
async def test_tokens_in_a_row_are_those_of_one_at_a_time(way: str, block_count: int) -> None:
    found = []
    for by_itself in (False, True):
        worker = FakeWorker(drafts_by_itself=by_itself)
        async with proposer_over(worker, block_count) as proposer:
            rounds = await asyncio.gather(*(wander(proposer, WAYS[way], seed) for seed in range(9)))
        found.append(repr([replace(each, cost=None) for own in rounds for each in own]))
    assert found[0] == found[1]


def calls_of(worker: FakeWorker) -> tuple[int, int]:
    """Steps, and calls that draw."""
    return worker.calls.count("tandem_step"), worker.calls.count("tandem_draft")


@pytest.mark.parametrize(
    ("by_itself", "count", "expected"), [(False, 4, (4, 4)), (True, 4, (1, 1)), (True, 6, (2, 2))]
)
async def test_a_proposal_takes_one_step_as_far_as_there_is_room(
    by_itself: bool, count: int, expected: tuple[int, int]
) -> None:
    """Of five tokens two are in a block of four places, which has room for the three that are promised."""
    worker = FakeWorker(drafts_by_itself=by_itself)
    async with proposer_over(worker) as proposer, proposer.sequence(GREEDY) as sequence:
        text = tuple(range(1, 5))
        await proposed(sequence, ProposeStep(Delta(0, text), 1))
        before = calls_of(worker)
        answer = await proposed(sequence, ProposeStep(Delta(4, (9,)), count))
        after = calls_of(worker)
    tokens = [*text, 9]
    for token_id in answer.token_ids:
        assert token_id == int(expected_logits(tokens).argmax())
        tokens.append(token_id)
    assert (after[0] - before[0], after[1] - before[1]) == expected


async def test_what_needs_the_host_is_drawn_a_token_at_a_time_beside_the_others() -> None:
    """Penalties count tokens."""
    penalized = replace(GREEDY, sampling=SamplingParams(0.0, repetition_penalty=1.5))

    async def texts(by_itself: bool) -> list[str]:
        worker = FakeWorker(drafts_by_itself=by_itself)
        async with proposer_over(worker) as proposer:
            found = await asyncio.gather(
                *(wander(proposer, options, seed) for seed in range(3) for options in (penalized, GREEDY))
            )
        return [repr([replace(each, cost=None) for each in rounds]) for rounds in found]

    assert await texts(True) == await texts(False)


def cost_of(answers: Sequence[Proposal]) -> list[int]:
    return [0 if each.cost is None else each.cost.tokens for each in answers]


async def test_costs_count_every_token() -> None:
    options = DraftOptions("r", SamplingParams(0.0), row_kind=RowKind.TOKEN)
    found = []
    for by_itself in (False, True):
        async with proposer_over(FakeWorker(drafts_by_itself=by_itself)) as proposer:
            found.append(cost_of(await wander(proposer, options, 4)))
    assert found[0] == found[1]


def test_a_step_of_several_passes_counts_as_the_mean_of_them() -> None:
    times = StepTimes()
    times.measured({(2, 1): 1.0})
    for _ in range(100):
        times.add(StepRecord(2, 8, 8, 0.0, 2.0, pass_count=4))
    assert times.profile.seconds[2, 1] < 0.8
    known = times.profile
    times.add(StepRecord(2, 7, 7, 0.0, 9.0, pass_count=4))  # not all of them took part in each
    assert times.profile is known


@pytest.mark.parametrize("way", WAYS)
async def test_branches_in_a_row_are_those_of_one_token_at_a_time(way: str) -> None:
    """Each round takes four steps: of the proposal, of its trunk, and of the branches, eight at a time."""
    found = []
    steps = []
    for by_itself in (False, True):
        worker = FakeWorker(drafts_by_itself=by_itself)
        async with proposer_over(worker) as proposer:
            rounds = [each async for each in drafted_rounds(proposer, WAYS[way], tuple(range(9)))]
        found.append([repr((text, answer.token_ids, known.outcomes)) for text, answer, known in rounds])
        found[-1] += [
            repr([(known.tokens(rank), known.distributions(rank)) for rank in range(len(known.outcomes))])
            for _, _, known in rounds
        ]
        steps.append(calls_of(worker)[0])
    assert found[0] == found[1]
    assert steps[1] <= 4 * 5 < steps[0] / 2, steps
