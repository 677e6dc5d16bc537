"""A rolling upgrade of drafting ahead with a real draft: either side may be too old for it."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from coordinator.speculation.request import RequestSpeculation
from draft_service.servicer import DraftServicer
from tandem.engine.models.loading import LoadedModel
from tandem.serving.interceptors import Context
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2
from tests.service.clients import Completed, complete_all
from tests.service.engines import Faults, draft, target, tiny_model
from tests.service.fakes import coordinating

SECONDS = 60.0
GREEDY = GenerationRequest(
    "def f(", max_tokens=24, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=20, seed=3)
REQUESTS = [
    GREEDY,
    *(replace(SAMPLED, rejection_sampling_strategy=rule) for rule in ("strict", "residual", "block")),
]


class OldDraft(DraftServicer):
    """A draft service without drafting ahead: it ignores the fields that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.granted = 0
        self.asked_for_none = 0
        """Steps without a token to propose that a newer draft would not answer."""
        self.pushes = 0

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async def known() -> AsyncIterator[draft_pb2.ProposeRequest]:
            async for request in request_iterator:
                if request.HasField("open"):
                    request.open.ClearField("ahead")
                elif request.HasField("step"):
                    self.granted += request.step.HasField("ahead")
                    self.asked_for_none += request.step.HasField("ahead") and not request.step.token_count
                    request.step.ClearField("ahead")
                    request.step.ClearField("proposed_count")
                yield request

        async for response in super().Propose(known(), context):
            self.pushes += response.HasField("outcomes")
            yield response


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


async def completed(model: LoadedModel, old: OldDraft, ahead: DraftAhead, at_once: int) -> list[Completed]:
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(target(model, Faults(), step_seconds=0.005))
        draft_address, _ = await stack.enter_async_context(draft(model, old))
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=30.0,
            speculation_policy="fixed",
            draft_ahead=ahead,
        )
        address = await stack.enter_async_context(coordinating(settings))
        return await complete_all(address, REQUESTS, at_once)


@pytest.mark.parametrize("at_once", [1, len(REQUESTS)], ids=["alone", "sharing a stream"])
@pytest.mark.parametrize("waits", [True, False], ids=["rounds wait after a miss", "the target goes on alone"])
async def test_an_old_draft_is_asked_as_before_and_never_lost(
    waits: bool,
    at_once: int,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = OldDraft()
    before = await completed(model, old, "off", at_once)
    assert old.granted == 0
    # As the cost model decides: a proposal is worth its wait, or it is not.
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda _, count: count if waits else 0)
    after = await completed(model, old, 8, at_once)
    assert old.granted > 0
    assert (old.asked_for_none == 0) == waits
    assert old.pushes == 0
    assert [each.token_ids for each in after] == [each.token_ids for each in before]
    assert not [record for record in caplog.records if record.message == "draft lost"]
    assert all(each.stats.accepted for each in after), "it went on drafting"
    assert not any(each.stats.ahead.hits for each in after)
