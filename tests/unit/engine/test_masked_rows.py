"""Rows of every kind are those of the masked logits, position by position, and of nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.interface import RowRequest
from tandem.engine.rows import masked
from tandem.errors import InvalidRequestError
from tandem.sampling.warping import warp
from tandem.types import Delta, DenseRow, IntArray, RowKind, SamplingParams, SupportRow, TokenRow, VerifyStep
from tests.unit.engine.verified import verified
from tests.unit.tandem.tiny_grammars import VOCABULARY_SIZE, ids_in, state_of

PROMPT = (4, 4, 4)
TOKENS = (*PROMPT, 0, 1, 4)
"""One committed, two proposed."""
WORDS = ("abca", "abcb", "abb", "ac", "abac")
ROW_COUNT = 3
LOGITS = torch.randn(ROW_COUNT, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))


def request(kind: RowKind, sampling: SamplingParams, supports: tuple[IntArray, ...] = ()) -> RowRequest:
    step = VerifyStep(Delta(4, TOKENS[4:]), kind, ROW_COUNT, supports)
    own = RowRequest(step, sampling, len(PROMPT), grammar=state_of(*WORDS))
    return own.with_tokens(TOKENS)


def expected() -> torch.Tensor:
    """By enumeration of the words."""
    allowed = [{1}, {0, 1, 4}, {0, 1}]
    rows = LOGITS.clone()
    for row, own in zip(rows, allowed, strict=True):
        row[[i for i in range(VOCABULARY_SIZE) if i not in own]] = -torch.inf
    return rows


def test_every_kind_of_row_is_that_of_the_masked_logits() -> None:
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)
    kinds = [
        (RowKind.TOKEN, greedy),
        (RowKind.DENSE, sampled),
        (RowKind.SUPPORT, sampled),
        (RowKind.TOKEN, sampled),
    ]
    own = [request(kind, sampling) for kind, sampling in kinds]
    assert all(each.grammar is None for each in own), "a grammar stays in the process of its sequence"
    rows = [ids_in(mask) for mask in own[0].masks] if own[0].masks is not None else []
    assert rows[1:] == [{0, 1, 4}, {0, 1}]
    wanted = expected()
    wanted[0] = -torch.inf
    wanted[0, sorted(rows[0])] = LOGITS[0, sorted(rows[0])]
    tokens, dense, support, drawn = verified(own, LOGITS.repeat(len(own), 1))
    assert tokens.rows == tuple(map(TokenRow, wanted.argmax(dim=-1).tolist()))
    for row, logits_row in zip(dense.rows, wanted, strict=True):
        assert isinstance(row, DenseRow)
        assert np.array_equal(row.logits, logits_row.numpy())
    probs = warp(wanted, [sampled] * ROW_COUNT)
    for support_row, drawn_row, probs_row in zip(support.rows, drawn.rows, probs, strict=True):
        assert isinstance(support_row, SupportRow)
        assert isinstance(drawn_row, TokenRow)
        assert support_row.outside_mass == pytest.approx(1.0)
        assert probs_row[support_row.outside_token_id] > 0.0
        assert probs_row[drawn_row.token_id] > 0.0


def test_other_requests_are_unchanged() -> None:
    plain = SamplingParams(temperature=0.0)
    step = VerifyStep(Delta(4, TOKENS[4:]), RowKind.TOKEN, ROW_COUNT)
    free = RowRequest(step, plain, len(PROMPT))
    (alone,) = verified([free], LOGITS)
    together = verified([request(RowKind.TOKEN, plain), free], LOGITS.repeat(2, 1))
    assert together[1].rows == alone.rows != together[0].rows


def test_penalties_see_the_tokens_and_masks_come_last() -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=50.0)
    own = request(RowKind.DENSE, sampling)
    assert own.token_ids == TOKENS
    (found,) = verified([own], LOGITS)
    row: Any = found.rows[1]
    assert np.isinf(row.logits).tolist() == np.isinf(expected()[1].numpy()).tolist()


def test_a_committed_token_that_the_grammar_forbids_is_refused() -> None:
    step = VerifyStep(Delta(0, (*PROMPT, 2, 2)), RowKind.TOKEN, 1)
    with pytest.raises(InvalidRequestError, match="token 1 of the completion is forbidden"):
        RowRequest(step, SamplingParams(), len(PROMPT), grammar=state_of(*WORDS)).with_tokens((*PROMPT, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_leave_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    before = logits.clone()
    rows = np.array([[0b101, 0], [-1, -1], [1 << 10, 0]], dtype=np.int32)
    found = masked(logits, rows)
    assert torch.equal(logits, before)
    assert found.dtype == torch.float32
    assert found.isfinite().sum(dim=1).tolist() == [2, VOCABULARY_SIZE, 1]
    assert torch.equal(found[1], logits[1].float())
