"""The rows that a round requests from the target, and that every kind of row gives the same token."""

from __future__ import annotations

import pytest
import torch

from coordinator.rejection import KEYED, Round
from coordinator.rejection.block import block
from coordinator.rejection.rounds import Decide
from coordinator.rejection.rules import residual
from coordinator.transport.target_client import RowChoice
from tandem.engine.interface import RowRequest
from tandem.types import Delta, Proposal, RowKind, SamplingParams, VerifyStep
from tests.unit.engine.verified import verified

EMPTY, FULL = Proposal(3), Proposal(3, (7, 8))


@pytest.mark.parametrize(
    ("kind", "with_statistics", "proposal", "expected"),
    [
        (RowKind.SUPPORT, False, EMPTY, RowKind.TOKEN),
        (RowKind.SUPPORT, False, FULL, RowKind.SUPPORT),
        (RowKind.SUPPORT, True, EMPTY, RowKind.SUPPORT),
        (RowKind.DENSE, False, EMPTY, RowKind.DENSE),
        (RowKind.TOKEN, False, FULL, RowKind.TOKEN),
    ],
)
def test_an_empty_proposal_requests_a_sample_only(
    kind: RowKind, with_statistics: bool, proposal: Proposal, expected: RowKind
) -> None:
    rows = RowChoice(kind, lambda _: (), 100, with_statistics)
    assert rows.kind_for(proposal) is expected


@pytest.mark.parametrize("rule", [residual, block])
def test_all_kinds_of_row_after_an_empty_proposal_give_the_same_token(rule: Decide) -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(5))
    seen = set()
    for seed in range(50):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        tokens = []
        for kind in RowKind:
            request = RowRequest(VerifyStep(Delta(0, (1, 2, 3)), kind, 1), sampling)
            [verification] = verified([request], logits)
            tokens.append(rule([Round(EMPTY, verification, sampling)], KEYED)[0].next_token_id)
        assert len(set(tokens)) == 1
        seen.add(tokens[0])
    assert len(seen) > 10  # the samples differ
