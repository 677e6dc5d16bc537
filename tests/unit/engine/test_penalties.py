"""Penalties agree with transformers and OpenAI's API at every position of a proposal."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tandem.engine.rows import History, RowRequest, penalized
from tandem.sampling.warping import warp
from tandem.types import Delta, DenseRow, RowKind, SamplingParams, SupportRow, TokenRow, VerifyStep
from tests.unit.engine.verified import verified

VOCABULARY_SIZE = 12
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
"""Six of the prompt, one committed, three proposed."""
PROMPT_LENGTH = 6
ROW_COUNT = 4


def logits_of(row_count: int = ROW_COUNT) -> torch.Tensor:
    return torch.randn(row_count, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1)) * 3


def contexts(token_ids: tuple[int, ...] = TOKENS) -> list[tuple[int, ...]]:
    """Return the tokens before each row's position."""
    return [token_ids[:length] for length in range(len(token_ids) - ROW_COUNT + 1, len(token_ids) + 1)]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_agrees_with_transformers_at_each_position(penalty: float) -> None:
    logits = logits_of()
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = torch.cat(
        [processor(torch.tensor([seen]), row[None]) for seen, row in zip(contexts(), logits, strict=True)]
    )
    actual = penalized(logits, History(PROMPT_LENGTH, TOKENS), SamplingParams(repetition_penalty=penalty))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (-1.5, 2.0)])
def test_frequency_and_presence_count_the_completion_alone(frequency: float, presence: float) -> None:
    logits = logits_of()
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    actual = penalized(logits, History(PROMPT_LENGTH, TOKENS), sampling)
    for row, seen, adjusted in zip(logits.tolist(), contexts(), actual.tolist(), strict=True):
        counts = Counter(seen[PROMPT_LENGTH:])
        expected = [
            logit - frequency * counts[token] - presence * (counts[token] > 0)
            for token, logit in enumerate(row)
        ]
        assert adjusted == pytest.approx(expected, abs=1e-5)


def test_repetition_comes_before_the_others() -> None:
    logits, history = logits_of(), History(PROMPT_LENGTH, TOKENS)
    both = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    first = penalized(logits, history, SamplingParams(repetition_penalty=1.3))
    assert torch.equal(
        penalized(logits, history, both), penalized(first, history, SamplingParams(frequency_penalty=0.5))
    )


def test_a_token_that_is_proposed_twice_counts_twice() -> None:
    history = History(1, (0, 7, 7))
    actual = penalized(torch.zeros(3, VOCABULARY_SIZE), history, SamplingParams(frequency_penalty=1.0))
    assert actual[:, 7].tolist() == [0.0, -1.0, -2.0]


def test_rows_of_the_prompt_itself_are_not_held_to_what_follows_it() -> None:
    actual = penalized(torch.zeros(2, 3), History(4, (0, 1, 2, 0)), SamplingParams(presence_penalty=1.0))
    assert not actual.any()


def request(kind: RowKind, sampling: SamplingParams) -> RowRequest:
    base = len(TOKENS) - ROW_COUNT + 1
    history = History(PROMPT_LENGTH, TOKENS) if sampling.penalizes else None
    return RowRequest(VerifyStep(Delta(base, TOKENS[base:]), kind, ROW_COUNT), sampling, history)


def test_every_kind_of_row_reflects_the_penalized_logits() -> None:
    logits = logits_of()
    greedy = SamplingParams(temperature=0.0, repetition_penalty=50.0, presence_penalty=2.0)
    sampled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=50.0, presence_penalty=2.0)
    expected = penalized(logits, History(PROMPT_LENGTH, TOKENS), greedy)
    assert not torch.equal(expected.argmax(dim=-1), logits.argmax(dim=-1)), "or nothing is shown"
    kinds = [(RowKind.TOKEN, greedy), (RowKind.DENSE, sampled), (RowKind.SUPPORT, sampled)]
    tokens, dense, support = verified(
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


def test_other_requests_without_penalties_are_unchanged() -> None:
    logits = logits_of()
    plain, penalizing = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=9.0),
    )
    alone = verified([request(RowKind.TOKEN, plain)], logits)
    together = verified(
        [request(RowKind.TOKEN, penalizing), request(RowKind.TOKEN, plain)], logits.repeat(2, 1)
    )
    assert together[1].rows == alone[0].rows
