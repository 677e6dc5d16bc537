"""Which outcomes of a verification to draft for: the likeliest, by the draft's own ranking and by what came true."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
"""Upper ends of the classes of shares; the last class ends at 1."""
_DOUBT = 6.0
"""A class's own counts weigh as much as this many imagined ones."""
_MAX_COUNT = 2000.0
"""Counts are halved beyond this: what came true long ago was about other text."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The draft's view of one verification: a row for each proposed token, and one for the token after them."""

    token_ids: Sequence[Sequence[int]]
    """Candidates of each row, the best first; shape [K + 1, F]."""
    scores: Sequence[Sequence[float]]
    """Their scores in nats, descending: log probabilities, with the noise that decides where noise does."""
    confidences: Sequence[float]
    """The draft's belief in each proposed token, 0 to 1; shape [K]."""


class _Calibration:
    """Frequency with which beliefs of each strength came true."""

    def __init__(self, prior_scale: float) -> None:
        lower = (0.0, *_EDGES)
        upper = (*_EDGES, 1.0)
        self._rates = [prior_scale * (low + high) / 2 for low, high in zip(lower, upper, strict=True)]
        self._priors = tuple(self._rates)
        self._hits = [0.0] * len(self._rates)
        self._counts = [0.0] * len(self._rates)

    def rate(self, share: float) -> float:
        return self._rates[bisect_left(_EDGES, share)]

    def add(self, share: float, came_true: bool) -> None:
        i = bisect_left(_EDGES, share)
        self._hits[i] += came_true
        self._counts[i] += 1.0
        if self._counts[i] > _MAX_COUNT:
            self._hits[i] /= 2
            self._counts[i] /= 2
        self._rates[i] = (self._hits[i] + _DOUBT * self._priors[i]) / (self._counts[i] + _DOUBT)


class OutcomeHistory:
    """Record of the outcomes that came true, for sequences whose tokens are decided alike."""

    def __init__(self) -> None:
        self._accepted = _Calibration(0.95)
        self._recovered = _Calibration(0.8)
        self._bonus = _Calibration(0.95)

    def likeliest(self, proposed: Sequence[int], ranking: Ranking, count: int) -> list[tuple[int, int]]:
        """The outcomes (accepted, next token) with the highest probability, best first.

        P(a accepted) * P(t follows, given a), both as often as what was believed as firmly came true so far.
        """
        found: list[tuple[float, int, int]] = []
        reached = 1.0
        for position, token_id in enumerate(proposed):
            accepted = self._accepted.rate(ranking.confidences[position])
            missed = reached * (1.0 - accepted)
            for candidate, share in _shares(ranking, position, token_id):
                found.append((missed * self._recovered.rate(share), position, candidate))
            reached *= accepted
        for candidate, share in _shares(ranking, len(proposed)):
            found.append((reached * self._bonus.rate(share), len(proposed), candidate))
        found.sort(key=lambda outcome: -outcome[0])
        return [(accepted, token_id) for _, accepted, token_id in found[:count]]

    def came(self, proposed: Sequence[int], ranking: Ranking, accepted: int, next_token_id: int) -> None:
        """Count what came of a round."""
        for position in range(min(accepted + 1, len(proposed))):
            self._accepted.add(ranking.confidences[position], position < accepted)
        is_bonus = accepted == len(proposed)
        shares = _shares(ranking, accepted, None if is_bonus else proposed[accepted])
        calibration = self._bonus if is_bonus else self._recovered
        for candidate, share in shares:
            calibration.add(share, candidate == next_token_id)


def _shares(ranking: Ranking, row: int, excluded: int | None = None) -> list[tuple[int, float]]:
    """Each candidate of a row with its share of the softmax over the candidates, without the excluded one."""
    pairs = [
        (token_id, score)
        for token_id, score in zip(ranking.token_ids[row], ranking.scores[row], strict=True)
        if token_id != excluded and score > -math.inf
    ]
    if not pairs:
        return []
    highest = pairs[0][1]
    weights = [math.exp(score - highest) for _, score in pairs]
    total = sum(weights)
    return [(token_id, weight / total) for (token_id, _), weight in zip(pairs, weights, strict=True)]
