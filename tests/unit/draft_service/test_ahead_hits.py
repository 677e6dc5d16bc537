"""A hit goes on with what its branch has computed, and proposes what would be proposed without it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tandem.types import Delta, DraftedOutcomes, DraftOptions, ProposeStep, RowKind
from tests.service.clients import until
from tests.unit.draft_service.ahead_rounds import (
    BUDGET,
    GREEDY,
    PROMPT,
    SECONDS,
    STRICT,
    SUPPORT,
    K,
    MakeModel,
    proposed,
    proposing,
    pushed,
)
from tests.unit.engine.tiny_models import VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", GREEDY), ("llama", STRICT), ("llama", SUPPORT), ("gpt2", STRICT)],
    ids=["greedy", "strict", "support", "learned positions"],
)
async def test_hits_that_follow_each_other_have_what_would_be_proposed(
    make_model: MakeModel, family: str, options: DraftOptions
) -> None:
    """Each goes on with a branch of the one before; where it is the first outcome, a lead shortens the way."""
    leads = 0
    async with proposing(make_model(family)) as proposer, proposer.sequence(options) as sequence:
        accepted_so_far = proposer._histories[options.row_kind, options.sampling.is_greedy]._accepted
        accepted_so_far._rates = [0.99] * len(
            accepted_so_far._rates
        )  # as a draft that is nearly always right
        first = await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, BUDGET))
        before, count = (*PROMPT, *first.token_ids), K
        for number, (rank, taken) in enumerate(
            [(0, 2), (0, 1), (0, 3), (5, K), (0, 2), (3, 1), (0, K), (0, 1)]
        ):
            drafted = await pushed(sequence)
            lead = drafted.columns[0].lead_token_ids
            leads += len(lead)
            async with proposer.sequence(replace(options, ahead=None)) as plain:
                for other in (0, rank):
                    accepted, token_id = drafted.outcomes[other]
                    tokens = (*before[: len(before) - count + accepted], token_id)
                    fresh = await proposed(plain, ProposeStep(Delta(0, tokens), K))
                    assert drafted.tokens(other) == fresh.token_ids, number
                    if other == 0:
                        assert lead == fresh.token_ids[1 : 1 + len(lead)]
            accepted, token_id = drafted.outcomes[rank]
            kept = len(before) - count + accepted
            tail = (token_id, *drafted.tokens(rank)[:taken])
            before, count = (*before[:kept], *tail), taken
            # The branches are then as long as they become.
            await until(lambda: proposer._engine._worker._background.is_empty, SECONDS)
            assert await sequence.propose(ProposeStep(Delta(kept, tail), 0, BUDGET, taken)) is None
    assert bool(leads) == (options.row_kind is RowKind.TOKEN)


@pytest.mark.parametrize("options", [GREEDY, STRICT], ids=["greedy", "strict"])
async def test_verifications_that_end_before_the_draft_has_read_the_last_one(
    make_model: MakeModel, options: DraftOptions
) -> None:
    """Several sequences go on with pushed outcomes at any moment, with proposals of any length."""
    async with proposing(make_model("llama"), max_sequences=16) as proposer:

        async def rounds(seed: int) -> None:
            chance = random.Random(seed)
            prompt, count = (seed, *PROMPT), K
            async with proposer.sequence(options) as sequence:
                assert sequence.pushed is not None
                first = await proposed(sequence, ProposeStep(Delta(0, prompt), K, BUDGET))
                tokens = [*prompt, *first.token_ids]
                for _ in range(60):
                    kept = len(tokens) - count + chance.randint(0, count)
                    following = [chance.randrange(VOCABULARY_SIZE)]
                    if chance.random() < 0.7:
                        outcomes = await sequence.pushed.get()
                        assert isinstance(outcomes, DraftedOutcomes)
                        if outcomes.depth == 0:
                            kept = outcomes.base_length + outcomes.accepted_counts[0]
                            following = [outcomes.next_token_ids[0], outcomes.token_ids[0]]
                    tokens[kept:], count = following, chance.randint(0, len(following) - 1)
                    step = ProposeStep(Delta(kept, following), 0, BUDGET, count)
                    assert await sequence.propose(step) is None
                    await asyncio.sleep(chance.choice((0.0, 0.002)))

        await asyncio.gather(*(rounds(seed) for seed in range(16)))
