"""Recovered tokens over real services do not depend on the kind of row."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.types import GenerationRequest, RowKind
from tests.service.clients import Completed, complete
from tests.service.engines import Faults, draft, target, tiny_model
from tests.service.fakes import coordinating

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


async def completed(model: LoadedModel, row_kind: RowKind | None = None) -> list[Completed]:
    """Complete every request with this target."""
    async with asyncio.timeout(BOUND_SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(target(model, Faults()))
        draft_address, _ = await stack.enter_async_context(draft(model))
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=30.0,
            speculation_policy="fixed",
        )
        address = await stack.enter_async_context(coordinating(settings))
        client = await stack.enter_async_context(Client(address))
        return [await complete(client, replace(request, row_kind=row_kind)) for request in REQUESTS]


async def test_dense_rows_give_the_text_of_support_rows(model: LoadedModel) -> None:
    support = await completed(model)
    dense = await completed(model, RowKind.DENSE)
    assert [each.token_ids for each in support] == [each.token_ids for each in dense]
    for each in support:
        assert 0 < sum(each.drafted) < each.stats.drafted
