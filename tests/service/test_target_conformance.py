"""`tandem doctor target`: our targets pass every check, and faults are found by the check that is for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from tandem.engine.models.loading import LoadedModel
from tandem.model.admin import Severity
from tandem.model.types import TokenRow, Verification
from tandem_coordinator.transport.target_conformance import TARGET_CHECKS, target_conformance
from tests.service.engines import Faults, target
from tests.service.test_own_heads import host, saved


async def problems(address: str, seconds: float = 30.0) -> list[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        findings = await target_conformance(channel, seconds)
    assert [each.check for each in findings] == list(TARGET_CHECKS)
    return [f"{each.check}: {each.detail}" for each in findings if each.severity is not Severity.OK]


async def test_a_target_conforms(model: LoadedModel) -> None:
    async with target(model, Faults()) as (address, _):
        assert await problems(address) == []


async def test_a_target_with_a_head_conforms(tmp_path: Path) -> None:
    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        found = await problems(hosted.address)
    assert [each for each in found if not each.startswith("tokenizer:")] == []


def other_tokens(answer: Verification) -> Verification:
    rows = tuple(TokenRow(row.token_id ^ 1) if isinstance(row, TokenRow) else row for row in answer.rows)
    return replace(answer, rows=rows)


def misplaced(answer: Verification) -> Verification:
    return replace(answer, base_length=answer.base_length + 1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(other_tokens, "rows: token row 0 names"), (misplaced, "rows: its rows begin at")],
)
async def test_a_fault_is_found(
    fault: Callable[[Verification], Verification], sentence: str, model: LoadedModel
) -> None:
    async with target(model, Faults(garbled=dict.fromkeys(range(1, 100), fault))) as (address, _):
        found = await problems(address, 2.0)
    assert any(each.startswith(sentence) for each in found)
