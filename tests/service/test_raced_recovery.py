"""Raced recovery over real services, and in a rolling upgrade, where either side may be too old for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.transport.target_client import RowChoice
from tandem.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.types import GenerationRequest, RowKind
from tandem.v1 import target_pb2
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


class Asked:
    """Counts the steps of a coordinator, and those with raced recovery; an old target ignores that field."""

    def __init__(self, *, is_old: bool = False) -> None:
        self._is_old = is_old
        self.steps = 0
        self.races = 0

    def __call__(self, request: target_pb2.VerifyRequest) -> None:
        if request.HasField("step"):
            self.steps += 1
            self.races += request.step.raced_recovery
            if self._is_old:
                request.step.ClearField("raced_recovery")


async def completed(
    model: LoadedModel, on_request: Asked, row_kind: RowKind | None = None
) -> list[Completed]:
    """Complete every request with this target."""
    async with asyncio.timeout(BOUND_SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(target(model, Faults(on_request=on_request)))
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


async def test_an_upgrade_of_either_side_keeps_the_text(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old_target, old_coordinator = Asked(), Asked(is_old=True), Asked()
    raced = await completed(model, new)
    first = await completed(model, old_target)
    monkeypatch.setattr(RowChoice, "races_for", lambda self, proposal: False)
    last = await completed(model, old_coordinator)
    assert [each.token_ids for each in first] == [each.token_ids for each in last]
    assert [each.drafted for each in first] == [each.drafted for each in last]
    for before, after in zip(first, raced, strict=True):
        assert before.token_ids != after.token_ids
    # Only rounds without a proposal lack it: each request's first round, while the draft reads the prompt.
    assert 0 < new.races < new.steps
    assert old_target.races > 0
    assert old_coordinator.races == 0


async def test_dense_rows_give_the_text_of_support_rows(model: LoadedModel) -> None:
    support = await completed(model, Asked())
    dense = await completed(model, Asked(), RowKind.DENSE)
    assert [each.token_ids for each in support] == [each.token_ids for each in dense]
    for each in support:
        assert 0 < sum(each.drafted) < each.stats.drafted
