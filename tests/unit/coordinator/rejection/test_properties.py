"""Properties of every rule, for any draft and target."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.types import (
    FloatArray,
    IntArray,
    NextToken,
    Proposal,
    SparseDistribution,
    SupportRow,
    Verification,
)
from tests.unit.coordinator.rejection.builders import SAMPLED, Accept, block, residual, uniforms

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
    drawn, targets, rows, tokens = [], [], [], []
    for _ in range(count):
        draft_probs, target_probs = _probs(draw(weights)), _probs(draw(weights))
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


@settings(max_examples=400, deadline=None, derandomize=True)
@given(case=rounds(), numbers=st.lists(unit, min_size=5, max_size=5))
def test_only_tokens_with_target_probability_are_emitted(
    case: tuple[Proposal, Verification, list[FloatArray]], numbers: list[float]
) -> None:
    _check(residual, case, numbers)
    _check(block, case, numbers)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=rounds(), numbers=st.lists(unit, min_size=5, max_size=5), position=st.integers(0, 3))
def test_an_invalid_draft_distribution_breaks_nothing(
    case: tuple[Proposal, Verification, list[FloatArray]], numbers: list[float], position: int
) -> None:
    proposal, verification, targets = case
    broken = tuple(
        SparseDistribution(sent.token_ids, sent.probs * (np.nan if index == position else 1.0))
        for index, sent in enumerate(proposal.distributions)
    )
    sent = Proposal(0, proposal.token_ids, broken)
    for accept in (residual, block):
        kept = _check(accept, (sent, verification, targets), numbers)
        assert not broken or len(broken) <= position or kept <= position


def test_block_keeps_more_than_residual_on_the_same_proposals() -> None:
    """2000 rounds of five tokens with fixed seeds: a mean of 0.17 tokens more per round, deviation 0.03."""
    rng = np.random.default_rng(0)
    ids = np.arange(VOCABULARY)
    kept = np.zeros((2000, 2))
    for trial in range(2000):
        drafts = rng.dirichlet(np.full(VOCABULARY, 1.0), 5)
        targets = [0.6 * draft + 0.4 * rng.dirichlet(np.full(VOCABULARY, 1.0)) for draft in drafts]
        tokens = tuple(int(rng.choice(ids, p=draft)) for draft in drafts)
        proposal = Proposal(0, tokens, tuple(SparseDistribution(ids, draft) for draft in drafts))
        rows = tuple(SupportRow(ids, target, 0.0, -1) for target in targets)
        verification = Verification(0, (*rows, SupportRow(ids[:0], np.array([]), 1.0, 0)))
        numbers = uniforms(*rng.random(5))
        for column, accept in enumerate((residual, block)):
            kept[trial, column] = accept(proposal, verification, SAMPLED, numbers).accepted_count
    gain = kept[:, 1] - kept[:, 0]
    assert gain.mean() > 5 * gain.std() / np.sqrt(2000)
