"""The target's distribution at one position, whichever kind of row tells it, and how a token of it is drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from coordinator.rejection.errors import RowError
from coordinator.rejection.uniforms import Uniforms, invert
from tandem.sampling.noise import race, target_keys
from tandem.sampling.warping import warp
from tandem.types import (
    DenseRow,
    FloatArray,
    IntArray,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TokenRow,
    Verification,
)

NO_DISTRIBUTION = "the target's row is not a probability distribution"
_NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)


class TargetDistribution(ABC):
    """The target's distribution at one position."""

    token_ids: IntArray
    """The support, shape [S]."""
    probs: FloatArray
    """Probabilities there, shape [S]."""
    outside_mass: float
    """Probability of all other tokens."""

    @abstractmethod
    def outside_token_id(self) -> int:
        """A sample of the distribution restricted to outside the support; -1 when there is no mass."""

    @abstractmethod
    def candidates(self, weights: FloatArray, scale: float) -> tuple[IntArray, FloatArray] | None:
        """Tokens that race when the support has these weights and all else scale * target: ids and weights, [N] each.

        None when the row tells too little for a race, as an older target's does.
        """

    @abstractmethod
    def statistics(self) -> RowStatistics:
        """Figures of the whole distribution. Raises RowError when they were not sent."""

    def index(self, token_id: int) -> int:
        """Index of `token_id` in the support. Raises RowError when it is absent."""
        index = find_id(self.token_ids, token_id)
        if index < 0:
            raise RowError(f"the target's row says nothing of token {token_id}, which the draft proposed")
        return index

    def prob(self, token_id: int) -> float:
        """Probability of a token of the support."""
        return float(self.probs[self.index(token_id)])

    def sample(self, uniform: float) -> int:
        """A token of the distribution. Raises RowError when it has no mass, or is not a number."""
        token_id = self._draw(self.probs, self.outside_mass, uniform)
        if token_id < 0:
            raise RowError(NO_DISTRIBUTION)
        return token_id

    def sample_next(self, uniforms: Uniforms, index: int) -> int:
        """A token of the distribution, raced where the row allows it, after `index` accepted ones.

        Raises:
            RowError: The row has no mass, or is not a number.
        """
        token_id = self._choose(self.probs, 1.0, uniforms, index)
        if token_id < 0:
            raise RowError(NO_DISTRIBUTION)
        return token_id

    def residual_mass(self, draft_probs: FloatArray, scale: float) -> float:
        """Sum of max(scale * target - draft, 0) over the vocabulary."""
        return float(self._residual(draft_probs, scale).sum()) + scale * self.outside_mass

    def sample_residual(
        self, draft_probs: FloatArray, uniforms: Uniforms, index: int, scale: float = 1.0
    ) -> int:
        """A token of the distribution in proportion to max(scale * target - draft, 0).

        Where that is zero everywhere, draft and target are equal and nothing is ever rejected, but for the
        rounding of probabilities on the wire; a token of the target's distribution is then right.

        Args:
            draft_probs: The draft's probabilities on the support, shape [S]; it has none outside.
            uniforms: Of the round.
            index: How many tokens were accepted.
            scale: What the target's probabilities are multiplied by; 1 for token-by-token rules.
        """
        token_id = self._choose(self._residual(draft_probs, scale), scale, uniforms, index)
        return token_id if token_id >= 0 else self.sample_next(uniforms, index)

    def _residual(self, draft_probs: FloatArray, scale: float) -> FloatArray:
        # A draft probability that is negative or not a number counts as zero, as in `JointRow.ratio`.
        weights: FloatArray = scale * self.probs - np.fmax(draft_probs, 0.0)
        return np.maximum(weights, 0.0, out=weights)

    def _choose(self, weights: FloatArray, scale: float, uniforms: Uniforms, index: int) -> int:
        """By a race, or with the round's uniform; -1 when the weights do not add up to a positive number."""
        candidates = self.candidates(weights, scale)
        if candidates is None:
            return self._draw(weights, scale * self.outside_mass, float(uniforms.recover[index]))
        return uniforms.race(index, *candidates)

    def _draw(self, weights: FloatArray, outside_mass: float, uniform: float) -> int:
        index = invert(weights, outside_mass, uniform)
        if index == weights.size:
            return self.outside_token_id()
        return int(self.token_ids[index]) if index >= 0 else -1


class _SupportTarget(TargetDistribution):
    def __init__(self, row: SupportRow) -> None:
        self.token_ids = row.token_ids
        self.probs = row.probs
        self.outside_mass = row.outside_mass if row.outside_token_id >= 0 else 0.0
        self._row = row

    def outside_token_id(self) -> int:
        return self._row.outside_token_id

    def candidates(self, weights: FloatArray, scale: float) -> tuple[IntArray, FloatArray] | None:
        row = self._row
        if row.outside_prob is None:
            return None
        if row.outside_token_id < 0:
            return self.token_ids, weights
        # The target ran the race outside the support with the same noise: its winner stands for all of them.
        return np.append(self.token_ids, row.outside_token_id), np.append(weights, scale * row.outside_prob)

    def statistics(self) -> RowStatistics:
        if self._row.statistics is None:
            raise RowError("the acceptance rule needs rows with statistics, and the target sent none")
        return self._row.statistics


class _DenseTarget(TargetDistribution):
    def __init__(self, row: DenseRow, token_ids: IntArray, sampling: SamplingParams, position: int) -> None:
        self.token_ids = token_ids
        self._logits = row.logits
        self._all_probs: FloatArray = warp(row.logits[None, :], [sampling])[0]
        self.probs = self._all_probs[token_ids]
        self._outside_probs = self._all_probs.copy()
        self._outside_probs[token_ids] = 0.0
        self.outside_mass = float(self._outside_probs.sum())
        self._sampling = sampling
        self._position = position

    def outside_token_id(self) -> int:
        keys = target_keys(self._sampling.seed, self._position, 1)
        return int(race(self._outside_probs[None, :], keys)[0])

    def candidates(self, weights: FloatArray, scale: float) -> tuple[IntArray, FloatArray] | None:
        all_weights = scale * self._all_probs
        all_weights[self.token_ids] = weights
        return np.arange(all_weights.size), all_weights

    def statistics(self) -> RowStatistics:
        probs = self._all_probs
        positive = probs[probs > 0.0]
        return RowStatistics(
            entropy=-float(np.sum(positive * np.log(positive))),
            max_prob=float(probs.max()),
            argmax_token_id=int(probs.argmax()),
            ranks=np.array([np.count_nonzero(probs > prob) for prob in self.probs], dtype=np.int64),
            logits=self._logits[self.token_ids],
        )


def target_distribution(
    verification: Verification, index: int, token_ids: IntArray, sampling: SamplingParams
) -> TargetDistribution:
    """The target's distribution that row `index` tells.

    Args:
        verification: The target's answer.
        index: Which of its rows.
        token_ids: The support to bring a dense row to, shape [S]. A support row keeps its own.
        sampling: What to make of a dense row's logits, and the seed of its sample.

    Raises:
        RowError: The row is a token row, which tells no probability.
    """
    row = verification.rows[index]
    if isinstance(row, SupportRow):
        return _SupportTarget(row)
    if isinstance(row, DenseRow):
        return _DenseTarget(row, token_ids, sampling, verification.base_length + index)
    raise RowError("the acceptance rule needs probabilities, and the target sent one token for each row")


def sample_target(verification: Verification, index: int, sampling: SamplingParams, uniform: float) -> int:
    """A token of the target's distribution at row `index`, whichever kind of row it is."""
    row = verification.rows[index]
    if isinstance(row, TokenRow):
        return row.token_id
    return target_distribution(verification, index, _NO_TOKENS, sampling).sample(uniform)


def sample_bonus(verification: Verification, sampling: SamplingParams, uniforms: Uniforms, index: int) -> int:
    """The token after all `index` proposed ones, for rules that race: a sample of the target at the last row."""
    row = verification.rows[index]
    if isinstance(row, TokenRow):
        return row.token_id
    return target_distribution(verification, index, _NO_TOKENS, sampling).sample_next(uniforms, index)


def target_argmax(verification: Verification, index: int, sampling: SamplingParams) -> int:
    """The target's most probable token at row `index`, the lowest id among equals.

    Raises:
        RowError: A token row at a temperature other than 0 is a sample; a support row needs statistics.
    """
    row = verification.rows[index]
    if isinstance(row, DenseRow):
        # Of tokens that tie for the highest logit, top-p may leave out the first.
        return int((row.logits if sampling.is_greedy else warp(row.logits[None, :], [sampling])).argmax())
    if isinstance(row, SupportRow):
        return _SupportTarget(row).statistics().argmax_token_id
    if not sampling.is_greedy:
        raise RowError(
            "the target's tokens are samples, and the acceptance rule needs its most probable ones"
        )
    return row.token_id


def find_id(token_ids: IntArray, token_id: int) -> int:
    """Index of an id among distinct ids, -1 when absent."""
    index = int((token_ids == token_id).argmax()) if token_ids.size else 0
    return index if token_ids.size and token_ids[index] == token_id else -1
