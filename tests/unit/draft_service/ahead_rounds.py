"""Rounds that draft ahead, on a proposer of a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer, StandaloneSequence
from tandem.engine.core.engine import Engine
from tandem.engine.models.loading import LoadedModel
from tandem.engine.settings import EngineSettings
from tandem.types import (
    AheadBudget,
    DraftedOutcomes,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)

SECONDS = 20.0
PROMPT = (5, 17, 80, 3, 44)
K = 4
BUDGET = AheadBudget(branch_count=12, token_count=K)
GREEDY = DraftOptions("r", SamplingParams(temperature=0.0), ahead=BUDGET, row_kind=RowKind.TOKEN)
STRICT = DraftOptions("r", SamplingParams(1.0, seed=3), ahead=BUDGET, row_kind=RowKind.TOKEN)
SUPPORT = DraftOptions("r", SamplingParams(0.9, seed=4), ahead=BUDGET, row_kind=RowKind.SUPPORT)

MakeModel = Callable[[str], LoadedModel]


@asynccontextmanager
async def proposing(
    model: LoadedModel, draft_top_k: int = 8, max_sequences: int = 3
) -> AsyncIterator[StandaloneProposer]:
    engine = Engine(model, propose_head, EngineSettings(max_sequences=max_sequences))
    engine.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield StandaloneProposer(engine, draft_top_k)
    finally:
        await engine.close()


@dataclass(frozen=True)
class Round:
    """All outcomes that were pushed for one verification."""

    columns: tuple[DraftedOutcomes, ...]

    @property
    def outcomes(self) -> list[tuple[int, int]]:
        first = self.columns[0]
        return list(zip(first.accepted_counts, first.next_token_ids, strict=True))

    def tokens(self, rank: int) -> tuple[int, ...]:
        return tuple(column.token_ids[rank] for column in self.columns if rank < len(column.token_ids))

    def distributions(self, rank: int) -> list[SparseDistribution]:
        return [column.distributions[rank] for column in self.columns if rank < len(column.distributions)]


async def pushed(sequence: StandaloneSequence, depths: int = K) -> Round:
    queue = sequence.pushed
    assert queue is not None
    columns = []
    for depth in range(depths):
        column = await queue.get()
        assert isinstance(column, DraftedOutcomes)
        assert column.depth == depth
        columns.append(column)
    return Round(tuple(columns))


async def proposed(sequence: StandaloneSequence, step: ProposeStep) -> Proposal:
    proposal = await sequence.propose(step)
    assert proposal is not None
    return proposal
