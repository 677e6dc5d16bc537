"""The target's distribution at one position, from any kind of row, and sampling from it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from coordinator.rejection.errors import RowError
from coordinator.rejection.uniforms import Uniforms, invert
from tandem.sampling.noise import sample, target_keys
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
        """Return a sample of the distribution outside the support; -1 when it has no mass there."""

    @abstractmethod
    def candidates(self, weights: FloatArray, scale: float) -> tuple[IntArray, FloatArray] | None:
        """Return the candidates to sample from when the support has these weights and all else scale * target.

        Returns:
            Ids and weights, [N] each; None when the row lacks `outside_prob`, as that of an older target does.
        """

    @abstractmethod
    def statistics(self) -> RowStatistics:
        """Return statistics of the whole distribution. Raises RowError when the target sent none."""

    def index(self, token_id: int) -> int:
        """Return the index of `token_id` in the support. Raises RowError when it is absent."""
        index = find_id(self.token_ids, token_id)
        if index < 0:
            raise RowError(f"the target's row leaves out token {token_id}, which the draft proposed")
        return index

    def prob(self, token_id: int) -> float:
        """Return the probability of a token of the support."""
        return float(self.probs[self.index(token_id)])

    def sample(self, uniform: float) -> int:
        """Draw a token of the distribution by inversion. Raises RowError when its mass is zero or NaN."""
        token_id = self._draw(self.probs, self.outside_mass, uniform)
        if token_id < 0:
            raise RowError(NO_DISTRIBUTION)
        return token_id

    def sample_next(self, uniforms: Uniforms, index: int) -> int:
        """Draw the token after `index` accepted ones, with the recovery keys where the row allows it.

        Raises:
            RowError: The mass of the row is zero or NaN.
        """
        token_id = self._choose(self.probs, 1.0, uniforms, index)
        if token_id < 0:
            raise RowError(NO_DISTRIBUTION)
        return token_id

    def residual_mass(self, draft_probs: FloatArray, scale: float) -> float:
        """Return the sum of max(scale * target - draft, 0) over the vocabulary."""
        return float(self._residual(draft_probs, scale).sum()) + scale * self.outside_mass

    def sample_residual(
        self, draft_probs: FloatArray, uniforms: Uniforms, index: int, scale: float = 1.0
    ) -> int:
        """Draw a token in proportion to max(scale * target - draft, 0).

        If that is zero everywhere, draft and target are equal, and only the rounding of probabilities on the wire
        can have caused a rejection: a token of the target's distribution is then correct.

        Args:
            draft_probs: The draft's probabilities on the support, shape [S]; it has none outside.
            uniforms: The round's random numbers.
            index: Number of accepted tokens.
            scale: Factor of the target's probabilities; 1 for token-by-token rules.
        """
        token_id = self._choose(self._residual(draft_probs, scale), scale, uniforms, index)
        return token_id if token_id >= 0 else self.sample_next(uniforms, index)

    def _residual(self, draft_probs: FloatArray, scale: float) -> FloatArray:
        # A draft probability that is negative or not a number counts as zero, as in `JointRow.ratio`.
        weights: FloatArray = scale * self.probs - np.fmax(draft_probs, 0.0)
        return np.maximum(weights, 0.0, out=weights)

    def _choose(self, weights: FloatArray, scale: float, uniforms: Uniforms, index: int) -> int:
        """Choose with the recovery keys or by inversion; -1 when the sum of the weights is not a positive number."""
        candidates = self.candidates(weights, scale)
        if candidates is None:
            return self._draw(weights, scale * self.outside_mass, float(uniforms.recover[index]))
        return uniforms.sample(index, *candidates)

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
        # The target sampled outside the support with the same noise, so its sample stands for all tokens there.
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
        return int(sample(self._outside_probs[None, :], keys)[0])

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
    """Return the target's distribution of row `index`.

    Args:
        verification: The target's answer.
        index: Index of the row.
        token_ids: The support to use for a dense row, shape [S]. A support row keeps its own.
        sampling: Warps a dense row's logits, and has the seed of its sample.

    Raises:
        RowError: The row is a token row, which contains no probabilities.
    """
    row = verification.rows[index]
    if isinstance(row, SupportRow):
        return _SupportTarget(row)
    if isinstance(row, DenseRow):
        return _DenseTarget(row, token_ids, sampling, verification.base_length + index)
    raise RowError("the acceptance rule needs probabilities, and the target sent one token for each row")


def sample_target(verification: Verification, index: int, sampling: SamplingParams, uniform: float) -> int:
    """Draw a token of the target's distribution at row `index`, of any kind."""
    row = verification.rows[index]
    if isinstance(row, TokenRow):
        return row.token_id
    return target_distribution(verification, index, _NO_TOKENS, sampling).sample(uniform)


def sample_bonus(verification: Verification, sampling: SamplingParams, uniforms: Uniforms, index: int) -> int:
    """Sample the token after all `index` proposed ones from the last row, for rules that use the recovery keys."""
    row = verification.rows[index]
    if isinstance(row, TokenRow):
        return row.token_id
    return target_distribution(verification, index, _NO_TOKENS, sampling).sample_next(uniforms, index)


def target_argmax(verification: Verification, index: int, sampling: SamplingParams) -> int:
    """Return the target's argmax at row `index`, the lowest id among equals.

    Raises:
        RowError: A token row at a temperature other than 0 is a sample; a support row needs statistics.
    """
    row = verification.rows[index]
    if isinstance(row, DenseRow):
        # Top-p may drop the first of several tokens that tie for the maximum logit.
        return int((row.logits if sampling.is_greedy else warp(row.logits[None, :], [sampling])).argmax())
    if isinstance(row, SupportRow):
        return _SupportTarget(row).statistics().argmax_token_id
    if not sampling.is_greedy:
        raise RowError("the target's tokens are samples, and the acceptance rule needs its argmax")
    return row.token_id


def find_id(token_ids: IntArray, token_id: int) -> int:
    """Return the index of an id among distinct ids, -1 when absent."""
    # Many rules ask for a support of one id, which needs no search.
    index = int((token_ids == token_id).argmax()) if token_ids.size > 1 else 0
    return index if token_ids.size and token_ids[index] == token_id else -1
