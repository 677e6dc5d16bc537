"""Recovered tokens over real services do not depend on the kind of row."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tandem.engine.models.loading import LoadedModel
from tandem.types import GenerationRequest, RowKind
from tests.service.clients import Completed, complete
from tests.service.engines import pair

BOUND_SECONDS = 60.0
# The draft is the target's model and keeps 8 of these 20 tokens: about half of its proposals are accepted.
REQUESTS = [
    GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, top_k=20, seed=seed, rejection_sampling_strategy=rule,
        num_speculative_tokens=3, ignore_eos=True,
    )
    for rule in ("residual", "block")
    for seed in (1, 2)
]  # fmt: skip


async def completed(model: LoadedModel, row_kind: RowKind | None = None) -> list[Completed]:
    """Complete every request with this target."""
    async with asyncio.timeout(BOUND_SECONDS), pair(model, model) as (client, _):
        return [await complete(client, replace(request, row_kind=row_kind)) for request in REQUESTS]


async def test_dense_rows_give_the_text_of_support_rows(model: LoadedModel) -> None:
    support = await completed(model)
    dense = await completed(model, RowKind.DENSE)
    assert [each.token_ids for each in support] == [each.token_ids for each in dense]
    for each in support:
        assert 0 < sum(each.drafted) < each.stats.drafted
