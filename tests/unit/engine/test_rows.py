"""Rows describe the target's distribution exactly, in any batch, after penalties, biases, `min_tokens` and grammars."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.engine.interface import RowRequest
from tandem.engine.rows import adjust_logits, apply_masks, apply_penalties
from tandem.engine.rows import verifications as of_cpu
from tandem.errors import InvalidRequestError
from tandem.model.sampling.noise import recovery_keys, sample, target_keys
from tandem.model.sampling.warping import warp
from tandem.model.types import (
    Delta,
    DenseRow,
    IntArray,
    LogitAdjustments,
    RowKind,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem_target.verifier import check_ids
from tests.paths import DEVICE
from tests.unit.engine.verified import verifications, verified
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
    own = TargetOptions(
        "r", sampling, prompt_length=PROMPT_LENGTH, adjustments=adjustments or LogitAdjustments()
    )
    return RowRequest(step, own, token_ids=TOKENS)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_agrees_with_transformers_at_each_position(penalty: float) -> None:
    logits = logits_of()
    found = apply_penalties(logits, TOKENS, PROMPT_LENGTH, SamplingParams(repetition_penalty=penalty))
    assert torch.equal(found, reference([RepetitionPenaltyLogitsProcessor(penalty)], logits))


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (-1.5, 2.0)])
def test_frequency_and_presence_count_the_completion_alone(frequency: float, presence: float) -> None:
    logits = logits_of()
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    found = apply_penalties(logits, TOKENS, PROMPT_LENGTH, sampling)
    for row, seen, changed in zip(logits.tolist(), CONTEXTS, found.tolist(), strict=True):
        counts = Counter(seen[PROMPT_LENGTH:])
        expected = [
            logit - frequency * counts[token] - presence * (counts[token] > 0)
            for token, logit in enumerate(row)
        ]
        assert changed == pytest.approx(expected, abs=1e-5)


def test_repetition_comes_before_the_others() -> None:
    both = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    first = apply_penalties(logits_of(), TOKENS, PROMPT_LENGTH, SamplingParams(repetition_penalty=1.3))
    second = apply_penalties(first, TOKENS, PROMPT_LENGTH, SamplingParams(frequency_penalty=0.5))
    assert torch.equal(apply_penalties(logits_of(), TOKENS, PROMPT_LENGTH, both), second)


def test_a_token_that_is_proposed_twice_counts_twice() -> None:
    found = apply_penalties(
        torch.zeros(3, VOCABULARY_SIZE), (0, 7, 7), 1, SamplingParams(frequency_penalty=1.0)
    )
    assert found[:, 7].tolist() == [0.0, -1.0, -2.0]


def test_rows_of_the_prompt_itself_are_not_held_to_what_follows_it() -> None:
    assert not apply_penalties(torch.zeros(2, 3), (0, 1, 2, 0), 4, SamplingParams(presence_penalty=1.0)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_agree_with_transformers(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    before = logits.clone()
    found = adjust_logits(logits, LogitAdjustments(BIASES), PROMPT_LENGTH, BASE_LENGTH)
    assert torch.equal(found, reference([bias_processor()], logits))
    assert torch.equal(logits, before), "neighbours may read the same logits"


@pytest.mark.parametrize("min_tokens", range(7))
def test_min_tokens_counts_at_each_position(min_tokens: int) -> None:
    logits = logits_of()
    processor = MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, min_tokens, list(ENDS))
    found = adjust_logits(logits, LogitAdjustments({}, min_tokens, ENDS), PROMPT_LENGTH, BASE_LENGTH)
    assert torch.equal(found, reference([processor], logits))
    # One token is committed before the first row.
    suppressed = min(max(min_tokens - 1, 0), ROW_COUNT)
    assert found[:, list(ENDS)].isinf().all(dim=1).tolist() == [row < suppressed for row in range(ROW_COUNT)]


def assert_rows(
    tokens: Verification,
    dense: Verification,
    support: Verification,
    expected: torch.Tensor,
    sampled: SamplingParams,
) -> None:
    """Greedy token rows, dense rows, and support rows without a support are those of these logits."""
    assert tokens.rows == tuple(map(TokenRow, expected.argmax(dim=-1).tolist()))
    for row, logits_row in zip(dense.rows, expected, strict=True):
        assert isinstance(row, DenseRow)
        # A GPU's exponentials and divisions may differ in the last place.
        np.testing.assert_array_max_ulp(row.logits, logits_row.numpy(), maxulp=0 if DEVICE == "cpu" else 1)
    for row, probs_row in zip(support.rows, warp(expected, [sampled] * len(expected)), strict=True):
        assert isinstance(row, SupportRow)
        assert row.outside_mass == pytest.approx(1.0)
        assert probs_row[row.outside_token_id] > 0.0


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
    assert_rows(tokens, dense, support, expected, sampled)


def test_a_support_row_gives_a_suppressed_token_no_probability() -> None:
    supports = tuple(np.array(ENDS) for _ in range(ROW_COUNT))
    wanted = LogitAdjustments({}, 3, ENDS)
    asked = request(RowKind.SUPPORT, SamplingParams(temperature=1.0), wanted, supports)
    (verification,) = verified([asked], logits_of())
    masses = [float(row.probs.sum()) for row in verification.rows if isinstance(row, SupportRow)]
    assert [mass > 0.0 for mass in masses] == [False, False, True, True]


IDS = st.integers(0, VOCABULARY_SIZE - 1)


@given(
    st.lists(IDS, max_size=8),
    st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), max_size=6),
    st.lists(IDS, min_size=ROW_COUNT, max_size=12),
    st.integers(0, 6),
)
def test_what_the_completion_may_not_hold_has_no_probability_at_any_position(
    allowed: list[int], sequences: list[tuple[int, ...]], tokens: list[int], prompt_length: int
) -> None:
    """By the definition: what a sequence would end with, behind the tokens of the completion before each row, a
    proposal's too."""
    base_length = len(tokens) - ROW_COUNT + 1
    prompt_length = min(prompt_length, base_length)
    wanted = LogitAdjustments(allowed_token_ids=tuple(allowed), forbidden_sequences=tuple(sequences))
    logits = logits_of()
    found = adjust_logits(logits, wanted, prompt_length, base_length, tokens)
    for row in range(ROW_COUNT):
        completion = tuple(tokens[prompt_length : base_length + row])
        for token_id in range(VOCABULARY_SIZE):
            written = (*completion, token_id)
            is_forbidden = any(written[-len(each) :] == each for each in sequences)
            is_allowed = (not allowed or token_id in allowed) and not is_forbidden
            assert float(found[row, token_id]) == (float(logits[row, token_id]) if is_allowed else -math.inf)


def test_bad_words_agree_with_transformers() -> None:
    """Its processor reads the prompt too, which holds none of these sequences."""
    sequences = ((2, 6), (5,), (9, 2, 6), (6, 5, 3))
    processor = NoBadWordsLogitsProcessor([list(each) for each in sequences], eos_token_id=None)
    logits = logits_of()
    found = adjust_logits(logits, LogitAdjustments(forbidden_sequences=sequences), 0, BASE_LENGTH, TOKENS)
    assert torch.equal(found, reference([processor], logits))


@pytest.mark.parametrize(
    "wanted",
    [
        LogitAdjustments(allowed_token_ids=(3, 4), forbidden_sequences=((3,), (5, 4))),
        LogitAdjustments(forbidden_sequences=tuple((token_id,) for token_id in range(12))),
        LogitAdjustments({}, 1, (3, 4), (3, 4)),
    ],
)
def test_adjustments_that_may_leave_no_token_are_refused(wanted: LogitAdjustments) -> None:
    with pytest.raises(InvalidRequestError, match="may leave no token"):
        check_ids(wanted, 12)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    check_ids(LogitAdjustments({11: 1.0}, 2, (0,), (1, 11), ((0, 11), (2,))), 12)
    for wanted in (
        LogitAdjustments({12: 1.0}),
        LogitAdjustments({}, 1, (-1,)),
        LogitAdjustments(allowed_token_ids=(0, 12)),
        LogitAdjustments(forbidden_sequences=((0, 12, 1),)),
    ):
        with pytest.raises(InvalidRequestError, match=r"must be in 0\.\.11"):
            check_ids(wanted, 12)
    with pytest.raises(InvalidRequestError, match="may leave no token"):
        check_ids(LogitAdjustments({}, 1, (0, 1)), 2)


PROMPT = (4, 4, 4)
MASKED_TOKENS = (*PROMPT, 0, 1, 4)
"""One committed, two proposed."""
WORDS = ("abca", "abcb", "abb", "ac", "abac")
MASKED_ROWS = 3
LOGITS = torch.randn(MASKED_ROWS, SMALL_VOCABULARY, generator=torch.Generator().manual_seed(1))


def masked_request(kind: RowKind, sampling: SamplingParams) -> RowRequest:
    step = VerifyStep(Delta(4, MASKED_TOKENS[4:]), kind, MASKED_ROWS)
    own = RowRequest(step, TargetOptions("r", sampling, prompt_length=len(PROMPT)), state_of(*WORDS))
    return own.with_tokens(MASKED_TOKENS)


def expected() -> torch.Tensor:
    """By enumeration of the words."""
    allowed = [{1}, {0, 1, 4}, {0, 1}]
    rows = LOGITS.clone()
    for row, own in zip(rows, allowed, strict=True):
        row[[i for i in range(SMALL_VOCABULARY) if i not in own]] = -torch.inf
    return rows


def test_every_kind_of_row_is_that_of_the_masked_logits() -> None:
    greedy = SamplingParams(temperature=0.0)
    sampled = SamplingParams(temperature=0.8, seed=3)
    own = [masked_request(RowKind.TOKEN, greedy)]
    own += [masked_request(kind, sampled) for kind in (RowKind.DENSE, RowKind.SUPPORT, RowKind.TOKEN)]
    assert all(each.grammar is None for each in own), "a grammar stays in the process of its sequence"
    rows = [ids_in(mask) for mask in own[0].masks] if own[0].masks is not None else []
    assert rows[1:] == [{0, 1, 4}, {0, 1}]
    wanted = expected()
    wanted[0] = -torch.inf
    wanted[0, sorted(rows[0])] = LOGITS[0, sorted(rows[0])]
    tokens, dense, support, drawn = verified(own, LOGITS.repeat(len(own), 1))
    assert_rows(tokens, dense, support, wanted, sampled)
    for drawn_row, probs_row in zip(drawn.rows, warp(wanted, [sampled] * MASKED_ROWS), strict=True):
        assert isinstance(drawn_row, TokenRow)
        assert probs_row[drawn_row.token_id] > 0.0


def test_penalties_see_the_tokens_and_masks_come_last() -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=50.0)
    own = masked_request(RowKind.DENSE, sampling)
    assert own.token_ids == MASKED_TOKENS
    (found,) = verified([own], LOGITS)
    row: Any = found.rows[1]
    assert np.isinf(row.logits).tolist() == np.isinf(expected()[1].numpy()).tolist()


def test_a_committed_token_that_the_grammar_forbids_is_refused() -> None:
    step = VerifyStep(Delta(0, (*PROMPT, 2, 2)), RowKind.TOKEN, 1)
    own = RowRequest(step, TargetOptions("r", SamplingParams(), prompt_length=len(PROMPT)), state_of(*WORDS))
    with pytest.raises(InvalidRequestError, match="token 1 of the completion is forbidden"):
        own.with_tokens((*PROMPT, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_leave_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    before = logits.clone()
    rows = np.array([[0b101, 0], [-1, -1], [1 << 10, 0]], dtype=np.int32)
    found = apply_masks(logits, rows)
    assert torch.equal(logits, before)
    assert found.dtype == torch.float32
    assert found.isfinite().sum(dim=1).tolist() == [2, SMALL_VOCABULARY, 1]
    assert torch.equal(found[1], logits[1].float())


WIDTH = 50
NO_IDS: IntArray = np.empty(0, dtype=np.int64)


def wide_logits(row_count: int) -> torch.Tensor:
    return torch.randn(row_count, WIDTH, generator=torch.Generator().manual_seed(0)) * 3


def asked_for(
    kind: RowKind,
    row_count: int,
    sampling: SamplingParams,
    supports: tuple[IntArray, ...] = (),
    *,
    with_statistics: bool = False,
    adjustments: LogitAdjustments | None = None,
) -> RowRequest:
    step = VerifyStep(Delta(10, [1] * row_count), kind, row_count, supports, with_statistics)
    return RowRequest(step, TargetOptions("r", sampling, adjustments=adjustments or LogitAdjustments()))


WARPED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5)
GREEDY = SamplingParams(temperature=0.0)


def test_sampled_token_rows_are_drawn_with_the_shared_noise() -> None:
    logits = wide_logits(3)
    (verification,) = verified([asked_for(RowKind.TOKEN, 3, WARPED)], logits)
    keys = torch.from_numpy(target_keys(WARPED.seed, verification.base_length, 3))
    expected = sample(warp(logits, [WARPED] * 3), keys).tolist()
    assert verification.rows == tuple(TokenRow(token_id) for token_id in expected)


def test_support_rows_split_the_distribution_into_inside_and_outside() -> None:
    logits = wide_logits(3)
    supports = (np.array([3, 9, 41]), np.array([7]))
    (verification,) = verified([asked_for(RowKind.SUPPORT, 3, WARPED, supports)], logits)
    probs = warp(logits, [WARPED] * 3).numpy()
    for i, (row, support) in enumerate(zip(verification.rows, (*supports, NO_IDS), strict=True)):
        assert isinstance(row, SupportRow)
        np.testing.assert_array_equal(row.token_ids, support)
        np.testing.assert_allclose(row.probs, probs[i, support], rtol=1e-12)
        assert row.outside_mass == pytest.approx(1.0 - probs[i, support].sum())
        assert row.outside_token_id not in support
        assert probs[i, row.outside_token_id] > 0.0


def test_a_row_without_support_draws_what_a_token_row_draws() -> None:
    """A step without a proposal has nothing to recover."""
    logits = wide_logits(1)
    (support,) = verified([asked_for(RowKind.SUPPORT, 1, WARPED)], logits)
    (token,) = verified([asked_for(RowKind.TOKEN, 1, WARPED)], logits)
    drawn = [row.outside_token_id for row in support.rows if isinstance(row, SupportRow)]
    assert drawn == [row.token_id for row in token.rows if isinstance(row, TokenRow)]


def test_raced_recovery_samples_with_the_keys_of_the_round() -> None:
    supports = (np.array([3, 9, 41]), np.array([7]))
    logits = wide_logits(3)
    (verification,) = verified([asked_for(RowKind.SUPPORT, 3, WARPED, supports)], logits)
    probs = warp(logits, [WARPED] * 3)
    outside = probs.clone()
    for row, support in enumerate(supports):
        outside[row, support] = 0.0
    keys = torch.from_numpy(recovery_keys(WARPED.seed, 11, 3))
    assert verification.base_length == 11
    winners = sample(outside, keys).tolist()
    found = [row for row in verification.rows if isinstance(row, SupportRow)]
    assert [row.outside_token_id for row in found] == winners
    assert [row.outside_prob for row in found] == probs[range(3), winners].tolist()


def test_no_mass_outside_means_no_sample() -> None:
    logits = wide_logits(1)
    sampling = SamplingParams(temperature=1.0, top_k=2)
    support = np.flatnonzero(warp(logits, [sampling])[0].numpy())
    (verification,) = verified([asked_for(RowKind.SUPPORT, 1, sampling, (support,))], logits)
    (row,) = verification.rows
    assert isinstance(row, SupportRow)
    assert (row.outside_mass, row.outside_token_id, row.outside_prob) == (0.0, -1, 0.0)


def test_statistics_are_those_of_the_whole_row() -> None:
    logits = wide_logits(1)
    sampling = SamplingParams(temperature=1.3)
    support = np.array([4, 30])
    kind = asked_for(RowKind.SUPPORT, 1, sampling, (support,), with_statistics=True)
    (verification,) = verified([kind], logits)
    (row,) = verification.rows
    assert isinstance(row, SupportRow)
    assert row.statistics is not None
    probs = warp(logits, [sampling])[0].numpy()
    assert row.statistics.entropy == pytest.approx(-(probs * np.log(probs)).sum())
    assert row.statistics.max_prob == pytest.approx(probs.max())
    assert row.statistics.argmax_token_id == probs.argmax()
    assert row.statistics.ranks.tolist() == [(probs > probs[token_id]).sum() for token_id in support]
    np.testing.assert_array_equal(row.statistics.logits, logits[0].numpy()[support])


def test_dense_rows_are_the_logits() -> None:
    logits = wide_logits(2).bfloat16()
    (verification,) = verified([asked_for(RowKind.DENSE, 2, WARPED)], logits)
    rows = [row.logits for row in verification.rows if isinstance(row, DenseRow)]
    np.testing.assert_array_equal(rows, logits.float().numpy())


SAMPLED = SamplingParams(temperature=1.0, seed=3)
SUPPORTS = (np.array([3, 9]), np.array([7]))
ASKED = {
    "greedy token": asked_for(RowKind.TOKEN, 3, GREEDY),
    "sampled token": asked_for(RowKind.TOKEN, 3, SAMPLED),
    "truncated token": asked_for(RowKind.TOKEN, 3, WARPED),
    "support": asked_for(RowKind.SUPPORT, 3, SAMPLED, SUPPORTS),
    "truncated support": asked_for(RowKind.SUPPORT, 3, WARPED, SUPPORTS, with_statistics=True),
    "greedy support": asked_for(RowKind.SUPPORT, 3, GREEDY, SUPPORTS, with_statistics=True),
    "whole support": asked_for(RowKind.SUPPORT, 3, SAMPLED, (np.arange(WIDTH),) * 2),
    "dense": asked_for(RowKind.DENSE, 3, SAMPLED),
    "adjusted": asked_for(RowKind.TOKEN, 3, GREEDY, adjustments=LogitAdjustments({4: 100.0})),
    "penalized": replace(
        asked_for(RowKind.TOKEN, 3, SamplingParams(0.0, repetition_penalty=9.0)), token_ids=range(13)
    ),
}


def test_rows_do_not_depend_on_the_batch() -> None:
    logits = wide_logits(3 * len(ASKED))
    together = verified([*ASKED.values()], logits)
    for request, own, verification in zip(ASKED.values(), torch.split(logits, 3), together, strict=True):
        assert repr(verified([request], own)[0]) == repr(verification)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ASKED)
def test_non_finite_logits_affect_only_their_own_request(kind: str, number: float) -> None:
    logits = wide_logits(9)
    expected = verifications([ASKED[kind]] * 3, logits)
    places: list[Any] = [*range(3, 6)]
    if number != -torch.inf:  # a single one of these is valid
        places.append((5, 40))
    for place in places:
        spoilt = logits.clone()
        spoilt[place] = number
        first, second, third = verifications([ASKED[kind]] * 3, spoilt)
        assert second is None
        assert repr([first, third]) == repr(expected[::2])


@pytest.mark.parametrize("kind", ASKED)
def test_tokens_with_minus_infinity_are_valid(kind: str) -> None:
    logits = wide_logits(3)
    logits[:, 20:] = -torch.inf
    assert None not in verifications([ASKED[kind]], logits)


@pytest.mark.skipif(DEVICE == "cpu", reason="compares another device with the CPU")
@pytest.mark.parametrize("kind", ASKED)
def test_every_kind_of_row_of_a_large_vocabulary_is_the_same_on_a_cpu(kind: str) -> None:
    logits = torch.randn(3, 128_256, generator=torch.Generator().manual_seed(2)) * 4
    (own,) = verified([ASKED[kind]], logits)
    (expected,) = of_cpu([ASKED[kind]], logits.clone())
    assert expected is not None
    for row, other in zip(own.rows, expected.rows, strict=True):
        if isinstance(row, SupportRow) and isinstance(other, SupportRow):
            assert row.outside_token_id == other.outside_token_id
            np.testing.assert_allclose(
                [*row.probs, row.outside_mass], [*other.probs, other.outside_mass], rtol=1e-11
            )
        else:
            assert repr(row) == repr(other)
