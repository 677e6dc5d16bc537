"""Exact output distributions of acceptance rules, summed over every branch.

What a round does depends on the proposal, drawn from the draft, and on uniforms. A rule compares each uniform with
thresholds that do not depend on the other uniforms, so the cube of uniforms falls into boxes on which the outcome is
constant. Bisection of the rule itself finds the boxes' edges without knowing its formulas: a wrong
threshold has a wrong measure.

The token after the accepted run comes from a race. The law of the race is put in its place:
tokens that race win in proportion to their weights, the exponentials being independent (that they are, and that the
race is run with them, is tested in `test_seeds.py`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.acceptance.rounds import Race
from tandem.model.types import (
    DenseRow,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    Verification,
)
from tests.unit.tandem.acceptance.builders import Accept, GivenNoise, law

Tokens = tuple[int, ...]
Model = Callable[[Tokens], Sequence[float]]
"""Probabilities of the next token after some tokens."""
Distribution = dict[Tokens, float]

NEAR_ZERO = 1e-13
BISECTIONS = 46
"""Edges are found to 2**-46, about 1e-14."""

OUTSIDE = 1000
"""Stands for the sample of row i from outside its support, as token id OUTSIDE + i, and is resolved afterwards."""

RACED = 10_000
"""Stands for a token sampled with recovery keys."""

SAMPLING = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Setting:
    """A draft and a target, and the form of their rows."""

    target: Model
    draft: Model
    token_count: int
    """Tokens of a proposal."""
    extra_ids: int = 0
    """Number of ids without draft probability in the support."""
    one_hot: bool = False
    """Proposals come without distributions; the draft's must be one-hot."""
    dense: bool = False
    """Draft and target send logits."""
    sent_count: Callable[[Tokens, Tokens], int] = lambda tokens, proposed: len(proposed)
    """How many of the drawn tokens the draft sends after these tokens."""


class RacesByLaw(GivenNoise):
    """Records the law of each race instead of running it."""

    def __init__(self, uniforms: Sequence[float], laws: dict[int, Distribution]) -> None:
        super().__init__(uniforms)
        self._laws = laws
        """For each number of accepted tokens, the probability of each token."""

    def sample(self, races: Sequence[Race]) -> list[int]:
        return [self._raced(race) for race in races]

    def _raced(self, race: Race) -> int:
        found: Distribution = {(token,): prob for token, prob in law(race).items()}
        if not found:
            return -1
        # The candidates depend only on the proposal and on the number of accepted tokens.
        assert self._laws.setdefault(race.accepted_count, found) == found
        return RACED


def target_distribution(target: Model, length: int) -> Distribution:
    """The distribution of the target's first `length` tokens."""
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*tokens, token): mass * prob
            for tokens, mass in distribution.items()
            for token, prob in enumerate(target(tokens))
            if prob > 0
        }
    return distribution


def total_variation(actual: Distribution, expected: Distribution) -> float:
    return sum(abs(actual.get(t, 0.0) - expected.get(t, 0.0)) for t in actual.keys() | expected.keys()) / 2


def output_distribution(accept: Accept, setting: Setting, length: int) -> Distribution:
    """Return the distribution of the first `length` tokens that rounds of speculation emit."""
    finished: defaultdict[Tokens, float] = defaultdict(float)
    growing: defaultdict[Tokens, float] = defaultdict(float, {(): 1.0})
    while growing:
        # The shortest first: all ways to it have been summed then, and it is gone on from once.
        tokens = min(growing, key=len)
        mass = growing.pop(tokens)
        for more, share in round_outcomes(accept, setting, tokens).items():
            longer = tokens + more
            (finished if len(longer) >= length else growing)[longer[:length]] += mass * share
    return finished


def mean_accepted(accept: Accept, setting: Setting) -> float:
    """Expected number of accepted tokens of the first round."""
    return sum(mass * (len(more) - 1) for more, mass in round_outcomes(accept, setting, ()).items())


def round_outcomes(accept: Accept, setting: Setting, tokens: Tokens) -> Distribution:
    """Return the distribution of the tokens that one round after `tokens` emits."""
    outcomes: defaultdict[Tokens, float] = defaultdict(float)
    for proposed, proposed_mass in _proposals(setting, tokens).items():
        proposal, verification = _round(setting, tokens, proposed)
        laws: dict[int, Distribution] = {}

        def decide(
            point: Tokens | Sequence[float],
            proposal: Proposal = proposal,
            verification: Verification = verification,
            laws: dict[int, Distribution] = laws,
        ) -> tuple[int, int]:
            uniforms = RacesByLaw(point, laws)
            acceptance = accept(proposal, verification, SAMPLING, uniforms)
            return acceptance.accepted_count, acceptance.next_token_id

        for (count, token), mass in measure(decide, len(proposed)).items():
            kept = proposed[:count]
            drawn = laws[count] if token == RACED else {(token,): 1.0}
            for (one,), chance in drawn.items():
                for next_token, share in _resolve(setting, verification, tokens + kept, count, one):
                    outcomes[(*kept, next_token)] += proposed_mass * mass * chance * share
    return outcomes


def measure(decide: Callable[[Sequence[float]], Hashable], dimension: int) -> dict[tuple[int, int], float]:
    """Return the volume of the unit cube that leads to each outcome."""
    edges = [_edges(decide, dimension, axis) for axis in range(dimension)]
    measures: defaultdict[tuple[int, int], float] = defaultdict(float)
    for box in itertools.product(*(list(itertools.pairwise(axis)) for axis in edges)):
        volume = float(np.prod([high - low for low, high in box]))
        measures[decide([(low + high) / 2 for low, high in box])] += volume  # type: ignore[index]
    return measures


def _edges(decide: Callable[[Sequence[float]], Hashable], dimension: int, axis: int) -> list[float]:
    """Return the points where the outcome changes along one axis, at every corner of the others."""
    edges = [0.0, 1.0]
    for corner in itertools.product((NEAR_ZERO, 1.0 - NEAR_ZERO), repeat=dimension - 1):

        def along(value: float, corner: Sequence[float] = corner) -> Hashable:
            return decide([*corner[:axis], value, *corner[axis:]])

        # An edge found from another corner need not be searched again.
        for edge, next_edge in list(itertools.pairwise(edges)):
            low = edge + NEAR_ZERO
            high = next_edge - NEAR_ZERO
            if low < high:
                edges.extend(_changes(along, low, high, along(low), along(high)))
        edges.sort()
    return edges


def _changes(
    along: Callable[[float], Hashable], low: float, high: float, at_low: Hashable, at_high: Hashable
) -> Iterable[float]:
    """Return the change points of a step function that never repeats a value."""
    if at_low == at_high:
        return []
    if high - low < 2.0**-BISECTIONS:
        return [(low + high) / 2]
    middle = (low + high) / 2
    at_middle = along(middle)
    return [
        *_changes(along, low, middle, at_low, at_middle),
        *_changes(along, middle, high, at_middle, at_high),
    ]


def _proposals(setting: Setting, tokens: Tokens) -> Distribution:
    drawn = target_distribution(lambda more: setting.draft(tokens + more), setting.token_count)
    sent: defaultdict[Tokens, float] = defaultdict(float)
    for proposed, mass in drawn.items():
        sent[proposed[: setting.sent_count(tokens, proposed)]] += mass
    return sent


def _round(setting: Setting, tokens: Tokens, proposed: Tokens) -> tuple[Proposal, Verification]:
    distributions: list[SparseDistribution] = []
    rows: list[SupportRow | DenseRow] = []
    for index in range(len(proposed)):
        prefix = tokens + proposed[:index]
        draft_probs = np.array(setting.draft(prefix))
        target_probs = np.array(setting.target(prefix))
        support = np.flatnonzero(draft_probs > 0)
        without = np.flatnonzero(draft_probs == 0)[: setting.extra_ids]
        requested = np.concatenate([without, support[::-1]])
        distributions.append(SparseDistribution(support, draft_probs[support]))
        if setting.dense:
            rows.append(DenseRow(_logits(target_probs)))
        else:
            rows.append(_support_row(target_probs, requested, index))
    last = np.array(setting.target(tokens + proposed))
    count = len(proposed)
    rows.append(
        DenseRow(_logits(last)) if setting.dense else _support_row(last, np.array([], np.int64), count)
    )
    sent = () if setting.one_hot else tuple(distributions)
    return Proposal(len(tokens), proposed, sent), Verification(len(tokens), tuple(rows))


def _logits(
    probs: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with np.errstate(divide="ignore"):
        # Logits on the wire are float32; the exact comparison needs float64, which the rules accept as well.
        return np.log(probs)


def _support_row(
    target_probs: np.ndarray[tuple[int], np.dtype[np.float64]],
    support: np.ndarray[tuple[int], np.dtype[np.int64]],
    index: int,
) -> SupportRow:
    outside = np.delete(target_probs, support)
    mass = float(outside.sum())
    # All tokens outside together race as one of their mass: the least of independent exponentials is exponential,
    # its rate the sum of theirs, whichever of them it is.
    stand_in = OUTSIDE + index if mass > 0 else -1
    return SupportRow(support, target_probs[support], mass, stand_in, outside_prob=mass)


def _resolve(
    setting: Setting, verification: Verification, prefix: Tokens, index: int, token: int
) -> Iterator[tuple[int, float]]:
    """Yield the tokens that an outcome stands for: one, or all outside the row's support."""
    if token < OUTSIDE:
        yield token, 1.0
        return
    assert token == OUTSIDE + index, "the sample of another row"
    row = verification.rows[index]
    inside = set(row.token_ids.tolist()) if isinstance(row, SupportRow) else set()
    outside = {other: prob for other, prob in enumerate(setting.target(prefix)) if other not in inside}
    for other, prob in outside.items():
        yield other, prob / sum(outside.values())
