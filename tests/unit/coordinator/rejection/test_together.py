"""Rounds that are decided together have the acceptances that they have one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rejection import block, residual
from coordinator.rejection.errors import RowError
from coordinator.rejection.rows import joint_row
from coordinator.rejection.strategies import STRATEGIES, find_strategy
from coordinator.rejection.together import joint_rows
from coordinator.rejection.together.rounds import AcceptMany, Round, RoundsOfMessage
from coordinator.rejection.uniforms import draw_uniforms
from tandem.types import (
    Acceptance,
    NextToken,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TokenRow,
    Verification,
)

VOCABULARY = 500
ONE_BY_ONE = {"residual": residual.accept, "block": block.accept}
JOINT_RULES = [strategy.name for strategy in STRATEGIES if strategy.accept_many is not None]


def accept_many_of(rule: str) -> AcceptMany:
    accept_many = find_strategy(rule).accept_many
    assert accept_many is not None
    return accept_many


def one_by_one(own: Round, rule: str = "residual") -> Acceptance:
    uniforms = draw_uniforms(own.sampling.seed, own.proposal.base_length, len(own.proposal))
    return ONE_BY_ONE[rule](own.proposal, own.verification, own.sampling, uniforms)


def test_every_rule_that_decides_together_is_tested_here() -> None:
    assert set(JOINT_RULES) == set(ONE_BY_ONE)


def make_round(generator: np.random.Generator, count: int, size: int, likeness: float) -> Round:
    """A round whose target is like the draft to this degree, with numbers as they come off the wire."""
    base_length, seed = int(generator.integers(1, 10_000)), int(generator.integers(-(2**62), 2**62))
    drawn, rows, tokens = [], [], []
    for _ in range(count):
        ids = generator.permutation(VOCABULARY)[: size + 1]
        support, outside = ids[:-1].astype(np.int64), int(ids[-1])
        draft_probs = generator.dirichlet(np.full(size, 0.3))
        target_probs = likeness * draft_probs + (1 - likeness) * generator.dirichlet(np.full(size, 0.3))
        mass = float(np.float32(generator.choice([0.0, 0.1, 0.9])))
        target_probs = (target_probs * (1 - mass)).astype(np.float32).astype(float)
        drawn.append(SparseDistribution(support, draft_probs))
        tokens.append(int(generator.choice(support, p=draft_probs)))
        has_outside = mass > 0
        rows.append(SupportRow(support, target_probs, mass, outside if has_outside else -1, None, mass / 2))
    rows.append(SupportRow(np.arange(0), np.empty(0), 1.0, int(generator.integers(VOCABULARY)), None, 0.25))
    return Round(
        Proposal(base_length, tuple(tokens), tuple(drawn)),
        Verification(base_length, tuple(rows)),
        SamplingParams(temperature=1.0, seed=seed),
    )


@pytest.mark.parametrize("rule", ONE_BY_ONE)
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 60), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        min_size=1,
        max_size=12,
    ),
)
def test_the_acceptances_are_those_one_by_one(
    rule: str, seed: int, shapes: list[tuple[int, int, float]]
) -> None:
    generator = np.random.default_rng(seed)
    rounds = [make_round(generator, *shape) for shape in shapes]
    for own, together in zip(rounds, accept_many_of(rule)(rounds), strict=True):
        if together is None:
            continue
        assert together == one_by_one(own, rule)


@pytest.mark.parametrize("rule", ONE_BY_ONE)
def test_usual_rounds_are_all_decided_and_end_in_every_way(rule: str) -> None:
    generator = np.random.default_rng(3)
    rounds = [make_round(generator, 4, 24, 0.8) for _ in range(200)]
    found = [each for each in accept_many_of(rule)(rounds) if each is not None]
    assert found == [one_by_one(own, rule) for own in rounds]
    assert len(found) == len(rounds)
    assert {each.accepted_count for each in found} == {0, 1, 2, 3, 4}
    outside = [
        acceptance.next_token_id not in own.proposal.distributions[acceptance.accepted_count].token_ids  # type: ignore[union-attr]
        for own, acceptance in zip(rounds, found, strict=True)
        if acceptance.next_token is NextToken.RECOVERED
    ]
    assert 0 < sum(outside) < len(outside)


def set_probs(own: Round, value: float) -> Round:
    """The first row gives each token this probability."""
    first, *others = own.verification.rows
    assert isinstance(first, SupportRow)
    changed = replace(first, probs=np.full(len(first.probs), value))
    return Round(own.proposal, replace(own.verification, rows=(changed, *others)), own.sampling)


def without_token(own: Round) -> Round:
    """The first token is none of its own support, and the second support names its token twice."""
    second = own.proposal.distributions[1]
    assert isinstance(second, SparseDistribution)
    second.token_ids[:2] = own.proposal.token_ids[1]
    tokens = (VOCABULARY, *own.proposal.token_ids[1:])
    return Round(replace(own.proposal, token_ids=tokens), own.verification, own.sampling)


UNUSUAL = {
    "nothing proposed": lambda own: Round(
        Proposal(own.proposal.base_length), replace(own.verification, rows=own.verification.rows[-1:]), own.sampling
    ),
    "a deterministic proposal": lambda own: Round(
        replace(own.proposal, distributions=()), own.verification, own.sampling
    ),
    "token rows": lambda own: Round(
        own.proposal, replace(own.verification, rows=(TokenRow(3),) * 5), own.sampling
    ),
    "an older target's rows": lambda own: Round(
        own.proposal,
        replace(
            own.verification,
            rows=tuple(replace(row, outside_prob=None) for row in own.verification.rows),
        ),
        own.sampling,
    ),
    "too few rows": lambda own: Round(
        own.proposal, replace(own.verification, rows=own.verification.rows[:2]), own.sampling
    ),
    "another length": lambda own: Round(
        own.proposal, replace(own.verification, base_length=7), own.sampling
    ),
    "a row of NaN": lambda own: set_probs(own, np.nan),
    "a row below zero": lambda own: set_probs(own, -1.0),
    "a token outside its own support": without_token,
}  # fmt: skip


@pytest.mark.parametrize("rule", ONE_BY_ONE)
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_the_rule_and_changes_no_other_round(name: str, rule: str) -> None:
    generator = np.random.default_rng(4)
    usual = [make_round(generator, 4, 24, 0.8) for _ in range(6)]
    unusual = UNUSUAL[name](make_round(generator, 4, 24, 0.8))
    found = accept_many_of(rule)([*usual[:3], unusual, *usual[3:]])
    assert found.pop(3) is None
    for own, together in zip(usual, found, strict=True):
        assert together in (None, one_by_one(own, rule))


def test_block_leaves_an_infinite_probability_to_the_rule() -> None:
    generator = np.random.default_rng(9)
    rounds = [make_round(generator, 4, 24, 0.8) for _ in range(4)]
    rounds[2] = set_probs(rounds[2], np.inf)
    found = accept_many_of("block")(rounds)
    assert found.pop(2) is None
    assert found == [one_by_one(own, "block") for own in (*rounds[:2], rounds[3])]


def test_block_leaves_a_uniform_at_the_edge_of_its_test_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a sum decides its last bit, and that would decide here."""
    generator = np.random.default_rng(10)
    rounds = [make_round(generator, 1, 24, 0.8) for _ in range(4)]
    weights = [
        min(1.0, joint_row(own.proposal, own.verification, 0, own.sampling).ratio(own.proposal.token_ids[0]))
        for own in rounds
    ]
    monkeypatch.setattr(
        joint_rows, "acceptance_uniforms", lambda rounds, counts: np.array(weights) * (1 - 1e-15)
    )
    assert accept_many_of("block")(rounds) == [None] * 4


@pytest.mark.parametrize("rule", ONE_BY_ONE)
def test_a_residual_of_zero_is_left_to_the_rule(rule: str) -> None:
    """Draft and target are equal but for a rounding, or the target has no mass at all."""
    generator = np.random.default_rng(5)
    rounds = [set_probs(make_round(generator, 2, 8, 0.5), 0.0) for _ in range(4)]
    for own, together in zip(rounds, accept_many_of(rule)(rounds), strict=True):
        row = own.verification.rows[0]
        assert isinstance(row, SupportRow)
        if row.outside_token_id >= 0:
            assert together == one_by_one(own, rule)
        else:
            assert together is None
            with pytest.raises(RowError):
                one_by_one(own, rule)


def test_rounds_of_a_message_are_decided_by_one_call() -> None:
    calls: list[int] = []

    def counting(rounds: Sequence[Round]) -> list[Acceptance | None]:
        calls.append(len(rounds))
        return accept_many_of("residual")(rounds)

    generator = np.random.default_rng(6)
    rounds = [make_round(generator, 3, 10, 0.8) for _ in range(5)]
    message = RoundsOfMessage()
    together = [message.add(counting, own) for own in rounds]
    assert calls == []
    assert [each() for each in together] == [one_by_one(own) for own in rounds]
    assert calls == [5]


def test_two_rounds_are_decided_one_by_one() -> None:
    generator = np.random.default_rng(7)
    message = RoundsOfMessage()
    together = [message.add(accept_many_of("residual"), make_round(generator, 3, 10, 0.8)) for _ in range(2)]
    assert [each() for each in together] == [None, None]


def test_rounds_that_come_after_a_decision_are_decided_with_each_other() -> None:
    generator = np.random.default_rng(8)
    message = RoundsOfMessage()
    for _ in range(2):
        rounds = [make_round(generator, 3, 10, 0.8) for _ in range(4)]
        together = [message.add(accept_many_of("residual"), own) for own in rounds]
        assert [each() for each in together] == [one_by_one(own) for own in rounds]
