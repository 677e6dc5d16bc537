"""Rounds that are decided together have the acceptances that they have one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.acceptance import rules
from tandem.acceptance.block import block
from tandem.acceptance.rounds import KEYED, Decide, MessageRounds, Round, decide_each
from tandem.errors import ProtocolError
from tandem.model.types import (
    Acceptance,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)

VOCABULARY = 500
RULES: dict[str, Decide] = {"residual": rules.residual, "block": block}


def one_by_one(decide: Decide, rounds: Sequence[Round]) -> list[Acceptance | str]:
    return [shown(decide_each(decide, [own])[0]) for own in rounds]


def shown(found: Acceptance | ProtocolError) -> Acceptance | str:
    return str(found) if isinstance(found, ProtocolError) else found


def make_round(generator: np.random.Generator, count: int, size: int, likeness: float) -> Round:
    """A round whose target is like the draft to this degree, with numbers as they come off the wire."""
    base_length = int(generator.integers(1, 10_000))
    seed = int(generator.integers(-(2**62), 2**62))
    drawn = []
    rows = []
    tokens = []
    for _ in range(count):
        ids = generator.permutation(VOCABULARY)[: size + 1]
        support = ids[:-1].astype(np.int64)
        outside = int(ids[-1])
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


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 60), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        min_size=1,
        max_size=12,
    ),
)
def test_acceptances_are_those_one_by_one(rule: str, seed: int, shapes: list[tuple[int, int, float]]) -> None:
    generator = np.random.default_rng(seed)
    rounds = [make_round(generator, *shape) for shape in shapes]
    assert [*map(shown, decide_each(RULES[rule], rounds))] == one_by_one(RULES[rule], rounds)


def set_probs(own: Round, value: float) -> Round:
    """The first row gives each token this probability."""
    first, *others = own.verification.rows
    assert isinstance(first, SupportRow)
    return with_rows(own, (replace(first, probs=np.full(len(first.probs), value)), *others))


def with_rows(own: Round, rows: tuple[TargetRow, ...]) -> Round:
    return replace(own, verification=replace(own.verification, rows=rows))


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
    "a deterministic proposal": lambda own: replace(own, proposal=replace(own.proposal, distributions=())),
    "token rows": lambda own: with_rows(own, (TokenRow(3),) * 5),
    "too few rows": lambda own: with_rows(own, own.verification.rows[:2]),
    "another length": lambda own: replace(own, verification=replace(own.verification, base_length=7)),
    "a row of NaN": lambda own: set_probs(own, np.nan),
    "a row below zero": lambda own: set_probs(own, -1.0),
    "a token outside its own support": without_token,
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_round_is_decided_and_changes_no_other(name: str, rule: str) -> None:
    generator = np.random.default_rng(4)
    usual = [make_round(generator, 4, 24, 0.8) for _ in range(6)]
    unusual = UNUSUAL[name](make_round(generator, 4, 24, 0.8))
    rounds = [*usual[:3], unusual, *usual[3:]]
    assert [*map(shown, decide_each(RULES[rule], rounds))] == one_by_one(RULES[rule], rounds)


def test_a_broken_round_of_a_message_breaks_no_other() -> None:
    generator = np.random.default_rng(6)
    rounds = [make_round(generator, 3, 10, 0.8) for _ in range(3)]
    rounds[1] = set_probs(rounds[1], np.nan)
    message = MessageRounds()
    first, broken, last = [message.add("the message", rules.residual, own) for own in rounds]
    assert [each.acceptance(rules.residual) for each in (first, last)] == rules.residual(
        [rounds[0], rounds[2]], KEYED
    )
    with pytest.raises(ProtocolError, match="distribution"):
        broken.acceptance(rules.residual)
