"""`tandem doctor target`: our targets pass every check, and faults are found by the check that is for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from tandem.engine.models.loading import LoadedModel
from tandem.model.admin import Severity
from tandem.model.types import Delta, DenseRow, GoesOn, Proposal, SupportRow, TokenRow, Verification
from tandem_coordinator.transport.target_conformance import TARGET_CHECKS, target_conformance
from tests.service.engines import Faults, FaultyTarget, target
from tests.service.fakes import serving
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


def other_masses(answer: Verification) -> Verification:
    rows = tuple(
        replace(row, probs=row.probs * 0.5, outside_mass=1.0 - 0.5 * float(row.probs.sum()))
        if isinstance(row, SupportRow)
        else row
        for row in answer.rows
    )
    return replace(answer, rows=rows)


class Forgetful:
    """Draws otherwise each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, answer: Verification) -> Verification:
        self.count += 1
        rows = tuple(
            TokenRow((row.token_id + self.count) % 90) if isinstance(row, TokenRow) else row
            for row in answer.rows
        )
        return replace(answer, rows=rows)


def elsewhere(answer: Verification) -> Verification:
    if answer.goes_on is None:
        return answer
    delta, own_tokens = answer.goes_on
    return replace(answer, goes_on=GoesOn(Delta(delta.base_length, (delta.token_ids[0] ^ 1,)), own_tokens))


def drifting(answer: Verification) -> Verification:
    """Each answer's logits are a little higher than the last one's."""
    drifting_by = next(STEPS)
    rows = tuple(
        DenseRow(row.logits + np.linspace(0.0, drifting_by, len(row.logits), dtype=np.float32))
        if isinstance(row, DenseRow)
        else row
        for row in answer.rows
    )
    return replace(answer, rows=rows)


STEPS = itertools.count(1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (other_tokens, "rows: token row 0 names"),
        (misplaced, "rows: its rows begin at"),
        (other_masses, "supports: support row 0: a probability is"),
        (drifting, "rollback: a rejected proposal left a trace"),
        (Forgetful(), "seeds: two sequences with one seed"),
        (elsewhere, "lead: it goes on with token"),
    ],
)
async def test_a_fault_is_found(
    fault: Callable[[Verification], Verification], sentence: str, model: LoadedModel
) -> None:
    async with target(model, Faults(garbled=dict.fromkeys(range(1, 100), fault))) as (address, _):
        found = await problems(address, 2.0)
    assert any(each.startswith(sentence) for each in found), found


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda own: replace(own, token_ids=(*own.token_ids, 1, 1)), "own head: own_head.max_tokens is 3"),
        (lambda own: replace(own, base_length=own.base_length + 1), "own head: its head's proposal extends"),
        (None, "own head: a step with own_head came back without the proposal"),
    ],
)
async def test_a_fault_of_a_head_is_found(
    fault: Callable[[Proposal], Proposal] | None, sentence: str, tmp_path: Path
) -> None:
    def changed(answer: Verification) -> Verification:
        if answer.proposal is None:
            return answer
        return replace(answer, proposal=None if fault is None else fault(answer.proposal))

    pair = saved(tmp_path, "eagle3")
    async with host(pair.target, pair.draft) as hosted:
        servicer = FaultyTarget(Faults(garbled=dict.fromkeys(range(1, 1000), changed)))
        servicer.verifier = hosted.verifier
        async with serving(servicer) as (address, _):
            found = await problems(address, 2.0)
    assert any(each.startswith(sentence) for each in found), found
