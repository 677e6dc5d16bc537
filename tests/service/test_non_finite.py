"""A model with non-finite logits: a target ends the request with INTERNAL, a draft costs only the speed-up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.proposers.drafting import propose_head
from tandem.engine.core import row_engine
from tandem.engine.core.jobs import Continue, Done, Failed, Job
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError, TandemError
from tests.service import engines
from tests.service.clients import complete
from tests.service.engines import pair
from tests.service.test_target_loss import REQUESTS as ALL

Outcomes = Sequence[Done[Any] | Failed | Continue]

REQUESTS = {name: request for name, request in ALL.items() if name != "block"}


class Spoilt:
    """A head that replaces logits by NaN from its `first` call on."""

    def __init__(self, head: Any, first: int) -> None:
        self._head = head
        self._first = first
        self.calls = 0

    def __call__(self, ready: Sequence[Job[Any]], logits: Tensor, **named: Any) -> Outcomes:
        self.calls += 1
        given = logits * torch.nan if self.calls >= self._first else logits
        outcomes: Outcomes = self._head(ready, given, **named)
        return outcomes


@pytest.mark.parametrize("rule", REQUESTS)
async def test_non_finite_logits_of_the_target_end_the_request_with_internal(
    rule: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_engine, "row_head", Spoilt(row_engine.row_head, first=3))
    async with pair(model, model) as (client, _):
        with pytest.raises(TandemError) as raised, caplog.at_level(logging.ERROR):
            await complete(client, REQUESTS[rule])
    assert isinstance(raised.value, ProtocolError) or type(raised.value) is TandemError
    lines = [record for record in caplog.records if record.message == "logits are not finite"]
    assert len(lines) == 1
    assert "not finite numbers" in str(lines[0].__dict__["reason"])
    assert lines[0].exc_info is None


@pytest.mark.parametrize("rule", REQUESTS)
async def test_non_finite_logits_of_the_draft_cost_only_the_speed_up(
    rule: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = REQUESTS[rule]
    async with pair(model, model) as (client, _):
        undisturbed = await complete(client, request)
    spoilt = Spoilt(propose_head, first=1)
    monkeypatch.setattr(engines, "propose_head", spoilt)
    async with pair(model, model) as (client, _):
        completed = await complete(client, request)
    assert spoilt.calls > 0
    assert completed.stats.drafted == 0
    assert len(completed.token_ids) == len(undisturbed.token_ids)
    if rule != "residual":  # its text depends on where rounds begin
        assert completed.text == undisturbed.text
