"""Every lossless rule emits the target's distribution, to 1e-12, by summing over all branches."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.acceptance.rounds import Noise, Round
from tandem.engine.rows import apply_masks, apply_penalties
from tandem.model.grammar import GrammarState
from tandem.model.types import (
    Acceptance,
    FloatArray,
    Grammar,
    GrammarKind,
    IntArray,
    NextToken,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    Verification,
)
from tests.unit.tandem.acceptance.builders import SAMPLED, Accept, block, residual, uniforms
from tests.unit.tandem.acceptance.enumeration import (
    Distribution,
    Model,
    Setting,
    Tokens,
    mean_accepted,
    output_distribution,
    target_distribution,
    total_variation,
)
from tests.unit.tandem.tiny_grammars import VOCABULARY_SIZE, allowed_by, tiny_grammars

RULES = {"residual": residual, "block": block}
TOLERANCE = 1e-12


def _table(*rows: str) -> Model:
    """A model that chooses a row by the sum of the previous tokens, so that every prefix matters."""
    probs = [[float(Fraction(entry)) for entry in row.split()] for row in rows]
    assert all(abs(sum(row) - 1) < 1e-15 for row in probs)
    return lambda tokens: probs[
        sum((place + 1) * (token + 1) for place, token in enumerate(tokens)) % len(probs)
    ]


TARGET = _table("1/2 1/3 1/6", "1/10 1/5 7/10", "3/7 3/7 1/7")
DRAFT = _table("1/5 3/5 1/5", "2/3 1/6 1/6", "1/4 1/4 1/2", "5/8 1/8 1/4")
PAIRS: dict[str, tuple[Model, Model]] = {
    "both positive": (TARGET, DRAFT),
    "draft lacks tokens": (TARGET, _table("0 3/5 2/5", "1 0 0", "1/4 0 3/4")),
    "target lacks tokens": (_table("0 1/3 2/3", "1/2 1/2 0", "0 1 0"), DRAFT),
    "each lacks what the other has": (_table("0 1/3 2/3", "1/2 1/2 0"), _table("1/4 3/4 0", "0 1/5 4/5")),
    "disjoint": (_table("0 1/3 2/3"), _table("1 0 0")),
    "equal": (TARGET, TARGET),
    "nearly certain": (_table("999/1000 1/1000 0", "1/1000 0 999/1000"), _table("1/1000 999/1000 0")),
    "two tokens": (_table("1/3 2/3", "9/10 1/10"), _table("2/3 1/3", "1/2 1/2")),
    "four tokens": (_table("1/8 1/8 1/2 1/4", "0 1/5 2/5 2/5"), _table("2/5 1/10 1/4 1/4", "0 0 1/2 1/2")),
}


def _assert_equal(actual: Distribution, expected: Distribution) -> None:
    for tokens in actual.keys() | expected.keys():
        assert actual.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=TOLERANCE), tokens


# The draft lacks one, two or three of four tokens, so the support can grow up to the whole vocabulary.
FOUR = (
    _table("1/8 1/8 1/2 1/4", "0 1/5 2/5 2/5", "1/2 0 0 1/2"),
    _table("0 1/10 1/2 2/5", "0 0 1/2 1/2", "0 0 1 0"),
)
DETERMINISTIC = _table("1 0 0", "0 0 1", "0 1 0")


def _until_unsure(tokens: Tokens, proposed: Tokens) -> int:
    """The first token that the draft finds unlikely is sent as well: to drop it after drawing would be biased."""
    places = range(len(proposed))
    unsure = (place for place in places if DRAFT(tokens + proposed[:place])[proposed[place]] < 0.3)
    return next(unsure, len(proposed) - 1) + 1


SETTINGS: dict[str, tuple[Setting, int]] = {
    **{
        f"{pair}, {count} proposed": (Setting(*PAIRS[pair], count), 3)
        for pair, count in [*itertools.product(PAIRS, (1, 2)), ("two tokens", 3)]
    },
    **{f"support with {more} more": (Setting(*FOUR, 2, extra_ids=more), 2) for more in (1, 2, 3)},
    **{
        f"deterministic draft, {more} more": (Setting(TARGET, DETERMINISTIC, 2, more, one_hot=True), 3)
        for more in (0, 1, 2)
    },
    **{
        f"dense rows, {pair}": (Setting(*PAIRS[pair], 2, dense=True), 2)
        for pair in ("both positive", "draft lacks tokens", "each lacks what the other has")
    },
    "ends with an unlikely token": (Setting(TARGET, DRAFT, 2, sent_count=_until_unsure), 2),
}
"""Settings, and the number of tokens whose joint distribution is compared."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_output_has_the_targets_distribution(rule: str, name: str) -> None:
    setting, length = SETTINGS[name]
    actual = output_distribution(RULES[rule], setting, length)
    _assert_equal(actual, target_distribution(setting.target, length))


@pytest.mark.parametrize("pair", PAIRS)
def test_block_accepts_at_least_as_much(pair: str) -> None:
    setting = Setting(*PAIRS[pair], token_count=2)
    token_by_token, at_once = (mean_accepted(accept, setting) for accept in (residual, block))
    assert at_once >= token_by_token - TOLERANCE
    if pair == "both positive":
        assert at_once > token_by_token + 0.01


def test_the_sum_over_branches_detects_a_small_mistake() -> None:
    """A rule that accepts one token in 10**9 too many must fail."""

    def accept(
        proposal: Proposal, verification: Verification, sampling: SamplingParams, noise: Noise
    ) -> Acceptance:
        class Generous(Noise):
            def uniform(self, own: Round, index: int) -> float:
                return noise.uniform(own, index) * (1 - 1e-9)

            sample = noise.sample

        return residual(proposal, verification, sampling, Generous())

    target, draft = PAIRS["both positive"]
    actual = output_distribution(accept, Setting(target, draft, 1), length=1)
    assert total_variation(actual, target_distribution(target, 1)) > 10 * TOLERANCE


PERIOD = (("a", "b"), ("b", "c"), ("a", "c"))
GRAMMAR = Grammar(GrammarKind.REGEX, "((a|b)(b|c)(a|c)){2}")
WORDS = ["".join(letters) for letters in itertools.product(*PERIOD * 2)]
LOGITS = torch.randn(5, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(3))
DRAFT_LOGITS = LOGITS + torch.randn(5, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(4))
ALL = np.full((1, 2), -1, dtype=np.int32)


def row(table: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return table[sum((place + 1) * (token + 1) for place, token in enumerate(tokens)) % len(table)]


def by_enumeration(table: torch.Tensor) -> Model:
    """The model among the ids that begin a word."""

    @cache
    def probabilities(tokens: Tokens) -> list[float]:
        allowed = allowed_by(WORDS, tokens)
        weights = [
            float(logit.double().exp()) if token in allowed else 0.0
            for token, logit in enumerate(row(table, tokens))
        ]
        return [weight / sum(weights) for weight in weights]

    return probabilities


def by_mask(table: torch.Tensor, state: GrammarState) -> Model:
    """The model as the services compute it: each row masked by the state after the proposal's tokens before it."""

    def probabilities(tokens: Tokens) -> list[float]:
        start = len(tokens) // 2  # wherever the proposal begins
        masks = state.masks(tokens[:start], tokens[start:]) if state.follow(list(tokens[:start])) else ALL
        found: list[float] = (
            apply_masks(row(table, tokens)[None], masks[-1:])[0].double().softmax(-1).tolist()
        )
        return found

    return probabilities


def unmasked(table: torch.Tensor) -> Model:
    @cache
    def probabilities(tokens: Tokens) -> list[float]:
        found: list[float] = row(table, tokens).double().softmax(-1).tolist()
        return found

    return probabilities


def looked_up(tokens: Tokens) -> list[float]:
    """A deterministic proposal that the grammar may forbid, as of ngram, or demand, as of a jump ahead."""
    return np.eye(VOCABULARY_SIZE)[sum(tokens) % 7].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", ["masked", "unmasked", "looked up"])
def test_the_output_has_the_masked_targets_distribution(rule: str, draft: str) -> None:
    state = tiny_grammars().compiled(GRAMMAR)
    drafts = {
        "masked": by_mask(DRAFT_LOGITS, state), "unmasked": unmasked(DRAFT_LOGITS), "looked up": looked_up
    }  # fmt: skip
    setting = Setting(by_mask(LOGITS, state), drafts[draft], 2, one_hot=draft == "looked up")
    expected = target_distribution(by_enumeration(LOGITS), 2)
    _assert_equal(output_distribution(RULES[rule], setting, 2), expected)
    assert total_variation(expected, target_distribution(unmasked(LOGITS), 2)) > 0.1, "it constrains"


PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=2.0),
    "presence and frequency": SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    "all": SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.75),
}
"""Of values with which binary32 is exact."""
PROMPT = (0, 2, 2)
TABLE = torch.tensor([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0], [-0.25, 0.75, 1.5]])
DRAFT_TABLE = torch.tensor([[0.5, 0.5, -0.75], [1.25, -1.0, 0.25], [0.0, 1.0, 0.5]])


def with_penalties(table: torch.Tensor, sampling: SamplingParams) -> Model:
    """The model after the prompt, by the definitions of transformers and of OpenAI."""

    @cache
    def probabilities(tokens: Tokens) -> list[float]:
        scores = row(table, tokens).tolist()
        for token, logit in enumerate(scores):
            penalty = sampling.repetition_penalty if token in (*PROMPT, *tokens) else 1.0
            score = logit / penalty if logit > 0 else logit * penalty
            count = tokens.count(token)
            scores[token] = (
                score - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)
            )
        weights = np.exp(scores)
        return (weights / weights.sum()).tolist()  # type: ignore[no-any-return]

    return probabilities


def as_verified(table: torch.Tensor, sampling: SamplingParams) -> Model:
    """The model as the target computes it: all rows of a proposal at once, wherever the proposal begins."""

    @cache
    def probabilities(tokens: Tokens) -> list[float]:
        start = len(tokens) // 2
        rows = torch.stack([row(table, tokens[:end]) for end in range(start, len(tokens) + 1)])
        found = apply_penalties(rows, (*PROMPT, *tokens), len(PROMPT), sampling)
        probs: list[float] = found[-1].double().softmax(-1).tolist()
        return probs

    return probabilities


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("draft", ["with penalties", "without", "looked up"])
def test_the_output_has_the_penalized_targets_distribution(rule: str, penalties: str, draft: str) -> None:
    """It makes no difference if the draft knows of the penalties."""
    sampling = PENALTIES[penalties]
    drafts: dict[str, Model] = {
        "with penalties": as_verified(DRAFT_TABLE, sampling),
        "without": as_verified(DRAFT_TABLE, SamplingParams()),
        "looked up": DETERMINISTIC,
    }
    setting = Setting(as_verified(TABLE, sampling), drafts[draft], 2, one_hot=draft == "looked up")
    expected = target_distribution(with_penalties(TABLE, sampling), 2)
    _assert_equal(output_distribution(RULES[rule], setting, 2), expected)
    plain = target_distribution(with_penalties(TABLE, SamplingParams()), 2)
    assert total_variation(expected, plain) > 0.1, "they count"


VOCABULARY = 8
OUTSIDE = 100
weights = st.lists(
    st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0, 3.0]), min_size=VOCABULARY, max_size=VOCABULARY
)
unit = st.one_of(
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True), st.sampled_from([2.0**-53, 1 - 2.0**-53])
)
counts = st.integers(0, 4)


def _probs(values: list[float]) -> FloatArray:
    """Normalised and rounded as on the wire."""
    total = sum(values)
    exact = np.array(values) / total if total else np.eye(VOCABULARY)[0]
    return exact.astype(np.float32).astype(np.float64)


def _row(target_probs: FloatArray, support: IntArray) -> SupportRow:
    mass = float(np.float32(np.delete(target_probs, support).sum()))
    return SupportRow(support, target_probs[support], mass, OUTSIDE if mass > 0 else -1, outside_prob=mass)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Proposal, Verification, list[FloatArray]]:
    count = draw(counts)
    drawn = []
    targets = []
    rows = []
    tokens = []
    for _ in range(count):
        draft_probs = _probs(draw(weights))
        target_probs = _probs(draw(weights))
        ids = np.flatnonzero(draft_probs > 0)
        tokens.append(int(draw(st.sampled_from(ids.tolist()))))
        drawn.append(SparseDistribution(ids, draft_probs[ids]))
        targets.append(target_probs)
        rows.append(_row(target_probs, draw(st.permutations(ids.tolist()).map(np.array))))
    last = _probs(draw(weights))
    rows.append(_row(last, np.array([], dtype=np.int64)))
    deterministic = draw(st.booleans())
    proposal = Proposal(0, tuple(tokens), () if deterministic else tuple(drawn))
    return proposal, Verification(0, tuple(rows)), [*targets, last]


def _check(
    accept: Accept, case: tuple[Proposal, Verification, list[FloatArray]], numbers: list[float]
) -> int:
    proposal, verification, targets = case
    count = len(proposal)
    acceptance = accept(proposal, verification, SAMPLED, uniforms(*numbers[:count]))
    kept = acceptance.accepted_count
    assert 0 <= kept <= count
    assert acceptance.next_token is (NextToken.BONUS if kept == count else NextToken.RECOVERED)
    # Tokens without target probability are never emitted.
    for index in range(kept):
        assert targets[index][proposal.token_ids[index]] > 0
    row = verification.rows[kept]
    assert isinstance(row, SupportRow)
    if acceptance.next_token_id == OUTSIDE:
        assert row.outside_mass > 0
    else:
        assert targets[kept][acceptance.next_token_id] > 0
        assert acceptance.next_token_id in row.token_ids
    return kept


@settings(max_examples=100, derandomize=True)
@given(case=rounds(), numbers=st.lists(unit, min_size=5, max_size=5))
def test_only_tokens_with_target_probability_are_emitted(
    case: tuple[Proposal, Verification, list[FloatArray]], numbers: list[float]
) -> None:
    _check(residual, case, numbers)
    _check(block, case, numbers)


@settings(max_examples=50, derandomize=True)
@given(
    case=rounds(),
    numbers=st.lists(unit, min_size=5, max_size=5),
    position=st.integers(0, 3),
    factor=st.sampled_from([np.nan, 0.0, -1.0]),
    whole=st.booleans(),
)
def test_an_invalid_draft_distribution_breaks_nothing(
    case: tuple[Proposal, Verification, list[FloatArray]],
    numbers: list[float],
    position: int,
    factor: float,
    whole: bool,
) -> None:
    """The draft gives its own token, or all of them, no probability, a negative one, or NaN."""
    proposal, verification, targets = case
    broken = tuple(
        SparseDistribution(
            sent.token_ids,
            np.where((index == position) & (whole | (sent.token_ids == token)), factor, 1.0) * sent.probs,
        )
        for index, (token, sent) in enumerate(zip(proposal.token_ids, proposal.distributions, strict=False))
    )
    sent = Proposal(0, proposal.token_ids, broken)
    for accept in (residual, block):
        kept = _check(accept, (sent, verification, targets), numbers)
        assert not broken or len(broken) <= position or kept <= position
