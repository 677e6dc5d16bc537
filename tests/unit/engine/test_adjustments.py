"""Biases and min_tokens agree with transformers at every position of a proposal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.engine.rows import Adjustments, History, RowRequest, check_ids, verifications
from tandem.errors import InvalidRequestError
from tandem.sampling.warping import warp
from tandem.types import (
    Delta,
    DenseRow,
    LogitAdjustments,
    RowKind,
    SamplingParams,
    SupportRow,
    TokenRow,
    Verification,
    VerifyStep,
)

VOCABULARY_SIZE = 12
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
"""Six of the prompt, one committed, three proposed."""
PROMPT_LENGTH = 6
ROW_COUNT = 4
BASE_LENGTH = len(TOKENS) - ROW_COUNT + 1
BIASES = {2: 4.0, 7: -100.0, 11: -0.5}
ENDS = (0, 8)
CPU = torch.device("cpu")


def logits_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(ROW_COUNT, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    return rows.to(dtype)


def adjusted(wanted: LogitAdjustments, logits: torch.Tensor) -> torch.Tensor:
    return Adjustments(wanted, PROMPT_LENGTH, CPU).applied(logits, BASE_LENGTH)


def reference(processors: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Return each row as transformers computes it from the tokens before its position."""
    chain: Any = LogitsProcessorList(processors)
    contexts = [TOKENS[:length] for length in range(BASE_LENGTH, len(TOKENS) + 1)]
    rows = [
        chain(torch.tensor([seen]), row[None].float()) for seen, row in zip(contexts, logits, strict=True)
    ]
    return torch.cat(rows)


def bias_processor() -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in BIASES.items()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_agree_with_transformers(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    before = logits.clone()
    assert torch.equal(adjusted(LogitAdjustments(BIASES), logits), reference([bias_processor()], logits))
    assert torch.equal(logits, before), "neighbours may read the same logits"


@pytest.mark.parametrize("min_tokens", range(7))
def test_min_tokens_counts_at_each_position(min_tokens: int) -> None:
    logits = logits_of()
    processor = MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, min_tokens, list(ENDS))
    actual = adjusted(LogitAdjustments({}, min_tokens, ENDS), logits)
    assert torch.equal(actual, reference([processor], logits))
    # One token is committed before the first row.
    suppressed = min(max(min_tokens - 1, 0), ROW_COUNT)
    assert actual[:, list(ENDS)].isinf().all(dim=1).tolist() == [row < suppressed for row in range(ROW_COUNT)]


def request(kind: RowKind, sampling: SamplingParams, *, is_adjusted: bool = True) -> RowRequest:
    wanted = LogitAdjustments(BIASES, 3, ENDS)
    history = History(PROMPT_LENGTH, TOKENS) if sampling.penalizes else None
    step = VerifyStep(Delta(BASE_LENGTH, TOKENS[BASE_LENGTH:]), kind, ROW_COUNT)
    return RowRequest(
        step, sampling, history, Adjustments(wanted, PROMPT_LENGTH, CPU) if is_adjusted else None
    )


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_every_kind_of_row_reflects_the_adjusted_logits(penalty: float) -> None:
    """In the order of transformers and of vLLM: before penalties."""
    logits = logits_of()
    greedy = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    sampled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=penalty)
    processors = [
        bias_processor(),
        *([RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []),
        MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 3, list(ENDS)),
    ]
    expected = reference(processors, logits)
    assert not torch.equal(expected.argmax(dim=-1), logits.argmax(dim=-1)), "or nothing is shown"
    kinds = [(RowKind.TOKEN, greedy), (RowKind.DENSE, sampled), (RowKind.SUPPORT, sampled)]
    tokens, dense, support = told_of(
        [request(kind, sampling) for kind, sampling in kinds], logits.repeat(len(kinds), 1)
    )
    assert tokens.rows == tuple(map(TokenRow, expected.argmax(dim=-1).tolist()))
    for row, logits_row in zip(dense.rows, expected, strict=True):
        assert isinstance(row, DenseRow)
        assert np.array_equal(row.logits, logits_row.numpy())
    probs = warp(expected, [sampled] * ROW_COUNT)
    for row, probs_row in zip(support.rows, probs, strict=True):
        assert isinstance(row, SupportRow)
        assert row.outside_mass == pytest.approx(1.0)
        assert probs_row[row.outside_token_id] > 0.0


def told_of(requests: list[RowRequest], logits: torch.Tensor) -> list[Verification]:
    answers = [answer for answer in verifications(requests, logits) if answer is not None]
    assert len(answers) == len(requests)
    return answers


def test_other_requests_without_adjustments_are_unchanged() -> None:
    logits, plain = logits_of(), SamplingParams(temperature=0.0)
    alone = told_of([request(RowKind.TOKEN, plain, is_adjusted=False)], logits)
    together = told_of(
        [request(RowKind.TOKEN, plain), request(RowKind.TOKEN, plain, is_adjusted=False)],
        logits.repeat(2, 1),
    )
    assert together[1].rows == alone[0].rows != together[0].rows


def test_a_support_row_gives_a_suppressed_token_no_probability() -> None:
    sampled = SamplingParams(temperature=1.0)
    wanted = Adjustments(LogitAdjustments({}, 3, ENDS), PROMPT_LENGTH, CPU)
    supports = tuple(np.array(ENDS) for _ in range(ROW_COUNT))
    step = VerifyStep(Delta(BASE_LENGTH, TOKENS[BASE_LENGTH:]), RowKind.SUPPORT, ROW_COUNT, supports)
    (verification,) = told_of([RowRequest(step, sampled, None, wanted)], logits_of())
    masses = [float(row.probs.sum()) for row in verification.rows if isinstance(row, SupportRow)]
    assert [mass > 0.0 for mass in masses] == [False, False, True, True]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    check_ids(LogitAdjustments({11: 1.0}, 2, (0,)), 12)
    for wanted in (LogitAdjustments({12: 1.0}), LogitAdjustments({}, 1, (-1,))):
        with pytest.raises(InvalidRequestError, match=r"is to be adjusted; ids must be in 0\.\.11"):
            check_ids(wanted, 12)
    with pytest.raises(InvalidRequestError, match="every token ends the completion"):
        check_ids(LogitAdjustments({}, 1, (0, 1)), 2)
