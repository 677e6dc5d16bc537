"""Penalties, biases, `min_tokens` and grammars change the rows of their own requests, position by position."""

from __future__ import annotations

from collections import Counter
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

from tandem.engine.interface import RowRequest
from tandem.engine.rows import adjusted, masked, penalized
from tandem.errors import InvalidRequestError
from tandem.sampling.warping import warp
from tandem.types import (
    Delta,
    DenseRow,
    IntArray,
    LogitAdjustments,
    RowKind,
    SamplingParams,
    SupportRow,
    TokenRow,
    VerifyStep,
)
from target_service.verifier import check_ids
from tests.unit.engine.verified import verified
from tests.unit.tandem.tiny_grammars import VOCABULARY_SIZE as SMALL_VOCABULARY
from tests.unit.tandem.tiny_grammars import ids_in, state_of

VOCABULARY_SIZE = 12
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
"""Six of the prompt, one committed, three proposed."""
PROMPT_LENGTH = 6
ROW_COUNT = 4
BASE_LENGTH = len(TOKENS) - ROW_COUNT + 1
CONTEXTS = [TOKENS[:length] for length in range(BASE_LENGTH, len(TOKENS) + 1)]
"""The tokens before each row's position."""
BIASES = {2: 4.0, 7: -100.0, 11: -0.5}
ENDS = (0, 8)
WANTED = LogitAdjustments(BIASES, 3, ENDS)


def logits_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(ROW_COUNT, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    return rows.to(dtype)


def reference(processors: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Each row as transformers computes it from the tokens before its position."""
    chain: Any = LogitsProcessorList(processors)
    rows = [
        chain(torch.tensor([seen]), row[None].float()) for seen, row in zip(CONTEXTS, logits, strict=True)
    ]
    return torch.cat(rows)


def bias_processor() -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in BIASES.items()])


def request(
    kind: RowKind,
    sampling: SamplingParams,
    adjustments: LogitAdjustments | None = None,
    supports: tuple[IntArray, ...] = (),
) -> RowRequest:
    step = VerifyStep(Delta(BASE_LENGTH, TOKENS[BASE_LENGTH:]), kind, ROW_COUNT, supports)
    return RowRequest(step, sampling, PROMPT_LENGTH, adjustments, token_ids=TOKENS)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_agrees_with_transformers_at_each_position(penalty: float) -> None:
    logits = logits_of()
    found = penalized(logits, TOKENS, PROMPT_LENGTH, SamplingParams(repetition_penalty=penalty))
    assert torch.equal(found, reference([RepetitionPenaltyLogitsProcessor(penalty)], logits))


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (-1.5, 2.0)])
def test_frequency_and_presence_count_the_completion_alone(frequency: float, presence: float) -> None:
    logits = logits_of()
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    found = penalized(logits, TOKENS, PROMPT_LENGTH, sampling)
    for row, seen, changed in zip(logits.tolist(), CONTEXTS, found.tolist(), strict=True):
        counts = Counter(seen[PROMPT_LENGTH:])
        expected = [
            logit - frequency * counts[token] - presence * (counts[token] > 0)
            for token, logit in enumerate(row)
        ]
        assert changed == pytest.approx(expected, abs=1e-5)


def test_repetition_comes_before_the_others() -> None:
    both = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    first = penalized(logits_of(), TOKENS, PROMPT_LENGTH, SamplingParams(repetition_penalty=1.3))
    second = penalized(first, TOKENS, PROMPT_LENGTH, SamplingParams(frequency_penalty=0.5))
    assert torch.equal(penalized(logits_of(), TOKENS, PROMPT_LENGTH, both), second)


def test_a_token_that_is_proposed_twice_counts_twice() -> None:
    found = penalized(torch.zeros(3, VOCABULARY_SIZE), (0, 7, 7), 1, SamplingParams(frequency_penalty=1.0))
    assert found[:, 7].tolist() == [0.0, -1.0, -2.0]


def test_rows_of_the_prompt_itself_are_not_held_to_what_follows_it() -> None:
    assert not penalized(torch.zeros(2, 3), (0, 1, 2, 0), 4, SamplingParams(presence_penalty=1.0)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_agree_with_transformers(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    before = logits.clone()
    found = adjusted(logits, LogitAdjustments(BIASES), PROMPT_LENGTH, BASE_LENGTH)
    assert torch.equal(found, reference([bias_processor()], logits))
    assert torch.equal(logits, before), "neighbours may read the same logits"


@pytest.mark.parametrize("min_tokens", range(7))
def test_min_tokens_counts_at_each_position(min_tokens: int) -> None:
    logits = logits_of()
    processor = MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, min_tokens, list(ENDS))
    found = adjusted(logits, LogitAdjustments({}, min_tokens, ENDS), PROMPT_LENGTH, BASE_LENGTH)
    assert torch.equal(found, reference([processor], logits))
    # One token is committed before the first row.
    suppressed = min(max(min_tokens - 1, 0), ROW_COUNT)
    assert found[:, list(ENDS)].isinf().all(dim=1).tolist() == [row < suppressed for row in range(ROW_COUNT)]


@pytest.mark.parametrize(
    ("penalty", "wanted"), [(1.0, WANTED), (1.3, WANTED), (50.0, None)], ids=["adjusted", "both", "penalized"]
)
def test_every_kind_of_row_has_the_changed_logits(penalty: float, wanted: LogitAdjustments | None) -> None:
    """In the order of transformers and of vLLM: adjustments before penalties."""
    logits = logits_of()
    greedy = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    sampled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=penalty)
    processors: list[Any] = [] if wanted is None else [bias_processor()]
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if wanted is not None:
        processors.append(MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 3, list(ENDS)))
    expected = reference(processors, logits)
    assert not torch.equal(expected.argmax(dim=-1), logits.argmax(dim=-1)), "or nothing is shown"
    kinds = [(RowKind.TOKEN, greedy), (RowKind.DENSE, sampled), (RowKind.SUPPORT, sampled)]
    tokens, dense, support = verified(
        [request(kind, sampling, wanted) for kind, sampling in kinds], logits.repeat(len(kinds), 1)
    )
    assert tokens.rows == tuple(map(TokenRow, expected.argmax(dim=-1).tolist()))
    for row, logits_row in zip(dense.rows, expected, strict=True):
        assert isinstance(row, DenseRow)
        assert np.array_equal(row.logits, logits_row.numpy())
    for row, probs_row in zip(support.rows, warp(expected, [sampled] * ROW_COUNT), strict=True):
        assert isinstance(row, SupportRow)
        assert row.outside_mass == pytest.approx(1.0)
        assert probs_row[row.outside_token_id] > 0.0


def test_other_requests_are_unchanged() -> None:
    logits, plain = logits_of(), SamplingParams(temperature=0.0)
    penalizing = SamplingParams(temperature=0.0, repetition_penalty=9.0)
    (alone,) = verified([request(RowKind.TOKEN, plain)], logits)
    together = verified(
        [
            request(RowKind.TOKEN, plain, WANTED),
            request(RowKind.TOKEN, plain),
            request(RowKind.TOKEN, penalizing),
        ],
        logits.repeat(3, 1),
    )
    assert together[1].rows == alone.rows
    assert together[0].rows != alone.rows != together[2].rows


def test_a_support_row_gives_a_suppressed_token_no_probability() -> None:
    supports = tuple(np.array(ENDS) for _ in range(ROW_COUNT))
    wanted = LogitAdjustments({}, 3, ENDS)
    asked = request(RowKind.SUPPORT, SamplingParams(temperature=1.0), wanted, supports)
    (verification,) = verified([asked], logits_of())
    masses = [float(row.probs.sum()) for row in verification.rows if isinstance(row, SupportRow)]
    assert [mass > 0.0 for mass in masses] == [False, False, True, True]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    check_ids(LogitAdjustments({11: 1.0}, 2, (0,)), 12)
    for wanted in (LogitAdjustments({12: 1.0}), LogitAdjustments({}, 1, (-1,))):
        with pytest.raises(InvalidRequestError, match=r"must be in 0\.\.11"):
            check_ids(wanted, 12)
    with pytest.raises(InvalidRequestError, match="every token ends"):
        check_ids(LogitAdjustments({}, 1, (0, 1)), 2)


PROMPT = (4, 4, 4)
MASKED_TOKENS = (*PROMPT, 0, 1, 4)
"""One committed, two proposed."""
WORDS = ("abca", "abcb", "abb", "ac", "abac")
MASKED_ROWS = 3
LOGITS = torch.randn(MASKED_ROWS, SMALL_VOCABULARY, generator=torch.Generator().manual_seed(1))


def masked_request(
    kind: RowKind, sampling: SamplingParams, supports: tuple[IntArray, ...] = ()
) -> RowRequest:
    step = VerifyStep(Delta(4, MASKED_TOKENS[4:]), kind, MASKED_ROWS, supports)
    own = RowRequest(step, sampling, len(PROMPT), grammar=state_of(*WORDS))
    return own.with_tokens(MASKED_TOKENS)


def expected() -> torch.Tensor:
    """By enumeration of the words."""
    allowed = [{1}, {0, 1, 4}, {0, 1}]
    rows = LOGITS.clone()
    for row, own in zip(rows, allowed, strict=True):
        row[[i for i in range(SMALL_VOCABULARY) if i not in own]] = -torch.inf
    return rows


def test_every_kind_of_row_is_that_of_the_masked_logits() -> None:
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)
    kinds = [
        (RowKind.TOKEN, greedy),
        (RowKind.DENSE, sampled),
        (RowKind.SUPPORT, sampled),
        (RowKind.TOKEN, sampled),
    ]
    own = [masked_request(kind, sampling) for kind, sampling in kinds]
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
    probs = warp(wanted, [sampled] * MASKED_ROWS)
    for support_row, drawn_row, probs_row in zip(support.rows, drawn.rows, probs, strict=True):
        assert isinstance(support_row, SupportRow)
        assert isinstance(drawn_row, TokenRow)
        assert support_row.outside_mass == pytest.approx(1.0)
        assert probs_row[support_row.outside_token_id] > 0.0
        assert probs_row[drawn_row.token_id] > 0.0


def test_requests_without_masks_are_unchanged() -> None:
    plain = SamplingParams(temperature=0.0)
    step = VerifyStep(Delta(4, MASKED_TOKENS[4:]), RowKind.TOKEN, MASKED_ROWS)
    free = RowRequest(step, plain, len(PROMPT))
    (alone,) = verified([free], LOGITS)
    together = verified([masked_request(RowKind.TOKEN, plain), free], LOGITS.repeat(2, 1))
    assert together[1].rows == alone.rows != together[0].rows


def test_penalties_see_the_tokens_and_masks_come_last() -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=50.0)
    own = masked_request(RowKind.DENSE, sampling)
    assert own.token_ids == MASKED_TOKENS
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
    assert found.isfinite().sum(dim=1).tolist() == [2, SMALL_VOCABULARY, 1]
    assert torch.equal(found[1], logits[1].float())
