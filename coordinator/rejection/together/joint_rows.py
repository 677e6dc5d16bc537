"""Draft and target rows of many rounds, one after the other in a few arrays, and what rules do with all of them.

Every number has the bits that `coordinator.rejection.rows` gives it for one round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.rejection.together.rounds import Round
from tandem.sampling.noise import Purpose, sample, stream_keys, token_uniforms
from tandem.types import Acceptance, FloatArray, IntArray, NextToken, SparseDistribution, SupportRow

_FIRST: IntArray = np.zeros(1, dtype=np.int64)
"""The first uniform of a stream is that of id 0."""


@dataclass(slots=True, eq=False)
class JointRows:
    """The rows of R rounds that propose N tokens, with supports of M ids in all."""

    rows: list[SupportRow]
    """The target's row of each proposed token, N."""
    counts: list[int]
    """Tokens of each proposal, R."""
    sizes: list[int]
    """Ids of each support, N, at least 1."""
    target_probs: FloatArray
    """Shape [M]."""
    draft_probs: FloatArray
    """Shape [M]."""
    token_probs: FloatArray
    """The target's probability of each proposed token, shape [N]."""
    ratios: FloatArray
    """`JointRow.ratio` of each proposed token, shape [N]."""
    uniforms: FloatArray
    """`Uniforms.accept` of each proposed token, shape [N]."""


Kept = tuple[int, float]
"""How many tokens of a proposal are kept, and the factor of the target in the residual if that is not all of them."""

Keep = Callable[[JointRows], Sequence[Kept | None]]
"""A rule's decision on R rounds; None for a round that it leaves to the rule."""


def decide(rounds: Sequence[Round], keep: Keep) -> list[Acceptance | None]:
    """Decide rounds as a rule would one by one, with the same random numbers.

    Args:
        rounds: Of any sequences; the keys of their noise come from their seeds and base lengths.
        keep: The rule.

    Returns:
        The acceptance of each round. None, which leaves the round to the rule, where `keep` does, or where a row is not
        of the usual form (support rows on exactly the draft's supports, with a probability outside) or leaves nothing
        to sample from.
    """
    found: list[Acceptance | None] = [None] * len(rounds)
    usual = [(index, each) for index, each in enumerate(rounds) if _is_usual(each)]
    joint = _joint_rows([each for _, each in usual]) if usual else None
    if joint is None:
        return found
    rejected: list[tuple[int, Round, Kept]] = []
    for (index, each), kept in zip(usual, keep(joint), strict=True):
        if kept is None:
            continue
        if kept[0] < len(each.proposal):
            rejected.append((index, each, kept))
        else:
            found[index] = _with_bonus(each)
    if rejected:
        recovered = _recovered([(each, kept) for _, each, kept in rejected])
        for (index, _, (count, _)), token_id in zip(rejected, recovered, strict=True):
            if token_id >= 0:
                found[index] = Acceptance(count, token_id, NextToken.RECOVERED)
    return found


def acceptance_uniforms(rounds: Sequence[Round], counts: Sequence[int]) -> FloatArray:
    """The uniforms of `draw_uniforms` that decide on each token of all rounds, shape [N]."""
    seeds = np.repeat(np.array([each.sampling.seed for each in rounds], dtype=np.int64), counts)
    bases = np.repeat(np.array([each.proposal.base_length for each in rounds], dtype=np.int64), counts)
    offsets = np.array([i for count in counts for i in range(count)], dtype=np.int64)
    keys = stream_keys(seeds, bases + offsets, Purpose.ACCEPTANCE, bases)
    uniforms: FloatArray = token_uniforms(keys, _FIRST)[:, 0]
    return uniforms


def _is_usual(own: Round) -> bool:
    proposal, verification = own.proposal, own.verification
    distributions, rows = proposal.distributions, verification.rows
    count = len(proposal)
    return (
        0 < count == len(distributions) == len(rows) - 1
        and proposal.base_length == verification.base_length
        and all(isinstance(row, SupportRow) and row.outside_prob is not None for row in rows)
        and all(
            isinstance(drawn, SparseDistribution) and _support(own, i).token_ids is drawn.token_ids
            for i, drawn in enumerate(distributions)
        )
    )


def _support(own: Round, index: int) -> SupportRow:
    row = own.verification.rows[index]
    assert isinstance(row, SupportRow)
    return row


def _drawn(own: Round, index: int) -> SparseDistribution:
    distribution = own.proposal.distributions[index]
    assert isinstance(distribution, SparseDistribution)
    return distribution


def _joint_rows(rounds: Sequence[Round]) -> JointRows | None:
    """The rows of usual rounds; None where a support does not have its token exactly once."""
    drawn = [_drawn(each, i) for each in rounds for i in range(len(each.proposal))]
    rows = [_support(each, i) for each in rounds for i in range(len(each.proposal))]
    counts = [len(each.proposal) for each in rounds]
    tokens = np.array([token_id for each in rounds for token_id in each.proposal.token_ids])
    sizes = [len(each.token_ids) for each in drawn]
    ids = np.concatenate([each.token_ids for each in drawn])
    found = np.flatnonzero(ids == np.repeat(tokens, sizes))
    if not np.array_equal(np.searchsorted(np.cumsum(sizes), found, "right"), np.arange(len(drawn))):
        return None
    all_target_probs = np.concatenate([each.probs for each in rows])
    all_draft_probs = np.concatenate([each.probs for each in drawn])
    target_probs, draft_probs = all_target_probs[found], all_draft_probs[found]
    # As in `JointRow.ratio`: 0 where the draft's probability is zero or NaN.
    ratios = np.zeros(len(drawn))
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(target_probs, draft_probs, out=ratios, where=draft_probs > 0.0)
    uniforms = acceptance_uniforms(rounds, counts)
    return JointRows(rows, counts, sizes, all_target_probs, all_draft_probs, target_probs, ratios, uniforms)


def _with_bonus(own: Round) -> Acceptance | None:
    """The whole proposal, and the target's sample after it: the only candidate of a row without a support."""
    row = _support(own, len(own.proposal))
    prob = row.outside_prob or 0.0
    if row.token_ids.size or row.outside_token_id < 0 or not 0.0 < prob < np.inf:
        return None
    return Acceptance(len(own.proposal), row.outside_token_id, NextToken.BONUS)


def _recovered(rejected: Sequence[tuple[Round, Kept]]) -> list[int]:
    """Sample in proportion to max(scale * target - draft, 0) after what each round keeps; -1 where that is zero."""
    rows = [_support(each, count) for each, (count, _) in rejected]
    width = 1 + max(len(row.token_ids) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    weights, draft_probs = np.zeros((len(rows), width)), np.zeros((len(rows), width))
    for i, (row, (each, (count, _))) in enumerate(zip(rows, rejected, strict=True)):
        size = len(row.token_ids)
        ids[i, :size], weights[i, :size] = row.token_ids, row.probs
        draft_probs[i, :size] = _drawn(each, count).probs
        if row.outside_token_id >= 0:
            # The target sampled outside the support with the same noise, so its sample stands for all tokens there.
            ids[i, size], weights[i, size] = row.outside_token_id, row.outside_prob
    with np.errstate(invalid="ignore"):
        weights *= np.array([scale for _, (_, scale) in rejected])[:, None]
        weights -= np.fmax(draft_probs, 0.0, out=draft_probs)
    np.maximum(weights, 0.0, out=weights)
    seeds = np.array([each.sampling.seed for each, _ in rejected], dtype=np.int64)
    bases = np.array([each.proposal.base_length for each, _ in rejected], dtype=np.int64)
    counts = np.array([count for _, (count, _) in rejected], dtype=np.int64)
    columns = sample(weights, stream_keys(seeds, bases + counts, Purpose.RECOVERY, bases), ids)
    chosen = np.arange(len(rows)), columns
    # If all weights are zero or one is NaN, the argmax lands on such a weight.
    is_sample = (weights[chosen] > 0.0) & (weights[chosen] < np.inf)
    token_ids: list[int] = np.where(is_sample, ids[chosen], -1).tolist()
    return token_ids
